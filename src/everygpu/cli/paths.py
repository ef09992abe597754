"""Type of options and arguments that are paths."""

import os
from typing import Any

import click


class UserPath(click.Path):
    """A path whose ``~`` is the home: in ``--json=~/rows.json`` a shell leaves it as it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(os.path.expanduser(value), param, ctx)
