"""``everygpu checkpoint diff``: the differences between two checkpoints' models."""

from pathlib import Path

import click

from everygpu.checkpoint.compare import Difference, compare
from everygpu.checkpoint.contents import read_any
from everygpu.cli.checkpoint.console import open_console
from everygpu.cli.paths import UserPath
from everygpu.cli.progress_bar import show_bar
from everygpu.cli.text import plain

_DIFFERENT = 1


@click.command("diff")
@click.argument("a", metavar="A", type=UserPath(path_type=Path))
@click.argument("b", metavar="B", type=UserPath(path_type=Path))
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance, as torch.isclose has it.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Absolute tolerance.")
@click.pass_context
def diff_checkpoints(context: click.Context, a: Path, b: Path, rtol: float, atol: float) -> None:
    """Compare the models in two checkpoints of any format.

    Exits with 0 when they are equal, or close where a tolerance is given, and with 1 when not. What
    wrappers add to names, such as `module.`, makes no difference.
    """
    first, second = (read_any(path).require_model(path) for path in (a, b))
    with show_bar("comparing", len(first), unit="tensors") as bar:
        found = compare(first, second, rtol=rtol, atol=atol, advance=bar.advance)
    console = open_console()
    for difference in found.differences:
        console.print(plain(_line(difference)))
    close = f", {found.num_close} within the tolerance" if rtol or atol else ""
    console.print(plain(f"{found.num_equal} equal{close}, {len(found.differences)} different"))
    if found.differences:
        context.exit(_DIFFERENT)


def _line(difference: Difference) -> str:
    if difference.max_abs is None:
        return f"{difference.name}: {difference.kind}: {difference.detail}"
    return f"{difference.name}: value: max abs {difference.max_abs:.3g}, max rel {difference.max_rel:.3g}"
