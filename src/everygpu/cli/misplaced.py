"""Options of a command that stand after the script, and so go to it: a note, never an error."""

from collections.abc import Sequence

import click

from everygpu.cli.text import harmless

_USAGE_ERROR = 2


def note_refused(script: str, args: Sequence[str], code: object) -> None:
    """Say that an option of the command stands after the script, if the script has refused its arguments."""
    if code == _USAGE_ERROR and (found := _find(args)):
        _tell(f"{found[0]} stands after {script} and goes to it. Put it before the script if it is this command's.")


def _find(args: Sequence[str]) -> list[str]:
    """Return the running command's long options among a script's arguments, but for those that follow ``--``."""
    context = click.get_current_context(silent=True)
    params = [] if context is None else [p for p in context.command.params if not getattr(p, "hidden", False)]
    own = {name for p in params for name in p.opts if name.startswith("--")}
    until = args.index("--") if "--" in args else len(args)
    names = (arg.partition("=")[0] for arg in args[:until])
    return [name for name in names if name in own]


def _tell(line: str) -> None:
    click.echo(harmless(f"{click.get_current_context().command_path}: {line}"), err=True)
