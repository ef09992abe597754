"""The options of ``everygpu run`` and ``everygpu devices`` that filter GPUs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import click

from everygpu.cli.numbers import Size
from everygpu.devices.select import Demand, SortKey, check_demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The values of the options, as ``select_devices`` takes them."""

    min_count: int | None = None
    min_free: str | None = None
    min_total: str | None = None
    max_utilization: float | None = None
    name: str | None = None
    exclude: tuple[str, ...] = ()
    sort: SortKey = "free"

    @property
    def are_given(self) -> bool:
        """Whether any option was given."""
        return self != Filters()

    def demand(self, count: int | None) -> Demand:
        """Make a demand for a number of GPUs.

        Raises:
            OptionError: an option is outside what it may be.
        """
        entries = [entry.strip() for text in self.exclude for entry in text.split(",")]
        return check_demand(
            count=count,
            min_count=self.min_count,
            min_free_memory=self.min_free,
            min_total_memory=self.min_total,
            max_utilization=self.max_utilization,
            name=self.name,
            exclude=[int(entry) if entry.isdecimal() else entry for entry in entries],
            sort=self.sort,
        )


_OPTIONS = (
    click.option("--min-count", type=int, metavar="N", help="Fewer than asked for will do, down to this many."),
    click.option("--min-free", type=Size(), metavar="SIZE", help="Only GPUs with this much memory free, such as 8GiB."),
    click.option("--min-total", type=Size(), metavar="SIZE", help="Only GPUs with this much memory altogether."),
    click.option("--max-utilization", type=float, metavar="PCT", help="Only GPUs that are at most this busy."),
    click.option("--name", metavar="TEXT", help="Only GPUs with this in their name, such as H100."),
    click.option(
        "--exclude", multiple=True, metavar="GPU", help="Not these: indices, or parts of a name or UUID, with commas."
    ),
    click.option(
        "--sort", type=click.Choice(get_args(SortKey)), default="free", show_default=True, help="Which come first."
    ),
)


def filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets them as ``filters``."""

    @functools.wraps(command)
    def collect(**options: Any) -> None:
        chosen = {name: options.pop(name) for name in Filters.__slots__}
        command(filters=Filters(**chosen), **options)

    for option in reversed(_OPTIONS):
        collect = option(collect)
    return collect
