"""``everygpu checkpoint``: look at checkpoints of any format, check and convert them."""

from importlib import import_module
from typing import Any

import click

from everygpu.errors import CheckpointError

_VERBS = {
    "convert": ("convert_checkpoint", "Write the model in SRC to DST, as safetensors or .pt."),
    "show": ("show_checkpoint", "Show the tensors in a checkpoint."),
    "verify": ("verify_checkpoint", "Check a checkpoint against its SHA256SUMS, or that it can be read."),
}


class _Group(click.Group):
    """Imports a verb when it is asked for: they need torch, which `everygpu run` must not load before its time."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, CheckpointError):  # some of ours are errors of the system as well
            raise
        except OSError as cause:  # such as a path that may not be looked at, or is too long
            raise CheckpointError(f"checkpoint: A path can't be read or written: {cause}. Check its rights.") from cause

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{cmd_name}"), _VERBS[cmd_name][0])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _VERBS.items()])


@click.group("checkpoint", cls=_Group)
def checkpoint() -> None:
    """Show, verify and convert checkpoints.

    A checkpoint is a directory of everygpu.save, a file of torch.save, a safetensors file, an index of
    shards, or a directory of torch.distributed.checkpoint, Transformers or Accelerate. Nothing in them is
    executed.
    """
