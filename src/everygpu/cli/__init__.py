"""The ``everygpu`` command: one file a verb; the only place that prints."""

import sys
from typing import Any

import click

from everygpu import __version__
from everygpu.cli.bench import compare_ways
from everygpu.cli.checkpoint import checkpoint
from everygpu.cli.devices import list_devices
from everygpu.cli.doctor import find_faults
from everygpu.cli.output import say, without_caller
from everygpu.cli.plan import plan_model
from everygpu.cli.run import run_chosen
from everygpu.errors import CheckpointError, DeviceError, EveryGPUError, OptionError

_EXIT_CODES = ((DeviceError, 3), (CheckpointError, 4), (OptionError, 2))


class _Group(click.Group):
    """Shows an error of ours, or of the system, as its message, without a traceback."""

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
            ctx.exit(130)
        except EveryGPUError as error:
            say(f"Error: {without_caller(str(error))}")
            ctx.exit(next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1))
        except BrokenPipeError:
            raise  # click ends without a word
        except OSError as error:
            say(f"Error: {error.strerror}: {error.filename or 'the output'}")
            ctx.exit(4 if ctx.invoked_subcommand == "checkpoint" and error.filename else 1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="everygpu")
def main() -> None:
    """Give a PyTorch script every GPU of the machine.

    \b
    Exit codes
      1    any other error
      2    wrong option
      3    no such GPU, or too few that fit
      4    unreadable checkpoint
      5    `run`: numbers not finite, or replicas differ
      6    `run`: no progress, or a GPU was lost
      130  Ctrl-C
    `run` passes on the script's own exit code.
    """


for command in (run_chosen, list_devices, find_faults, compare_ways, plan_model, checkpoint):
    main.add_command(command)
