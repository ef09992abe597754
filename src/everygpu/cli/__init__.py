"""The ``everygpu`` command: one file a verb; the only place that prints."""

import sys
from typing import Any

import click

from everygpu import __version__
from everygpu.cli import bench, doctor, run
from everygpu.cli.checkpoint import checkpoint
from everygpu.cli.devices import list_devices
from everygpu.cli.output import say, without_caller
from everygpu.cli.plan import plan_model
from everygpu.errors import EveryGPUError
from everygpu.exit_codes import INTERRUPTED, MEANINGS, OTHER, UNREADABLE, code_of

_HELP = "\n".join(
    (
        "Give a PyTorch script every GPU of the machine.\n",
        "\b",
        "Exit codes",
        *(f"  {code:<4} {meaning}" for code, meaning in MEANINGS.items()),
        "`run` passes on the script's own exit code.",
    )
)


class _Group(click.Group):
    """Shows errors of everygpu and of the system as a message without traceback."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if sys.stdout is None and args[:1] != ["run"]:  # a script may do without
            raise click.ClickException("The output is closed. Redirect it to a file, or to /dev/null.")
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except EveryGPUError as error:
            say(f"Error: {without_caller(str(error))}")
            ctx.exit(code_of(error))
        except BrokenPipeError:
            raise  # click ends without a word
        except OSError as error:
            say(f"Error: {error.strerror}: {error.filename or 'the output'}" if error.strerror else f"Error: {error}")
            ctx.exit(UNREADABLE if ctx.invoked_subcommand == "checkpoint" and error.filename else OTHER)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, help=_HELP)
@click.version_option(__version__, prog_name="everygpu")
def main() -> None:
    """Group the commands."""


for command in (run.run, list_devices, doctor.doctor, bench.bench, plan_model, checkpoint):
    main.add_command(command)
