"""``everygpu checkpoint``: look at checkpoints of any format, check and convert them."""

from typing import Any

import click

from everygpu.cli.checkpoint.convert import convert_checkpoint
from everygpu.cli.checkpoint.show import show_checkpoint
from everygpu.cli.checkpoint.verify import verify_checkpoint
from everygpu.errors import CheckpointError


class _Group(click.Group):
    """Shows what the system says of a path as an error of a checkpoint."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, CheckpointError):  # some of ours are errors of the system as well
            raise
        except OSError as cause:  # such as a path that may not be looked at, or is too long
            raise CheckpointError(f"checkpoint: A path can't be read or written: {cause}. Check its rights.") from cause


@click.group("checkpoint", cls=_Group)
def checkpoint() -> None:
    """Show, verify and convert checkpoints.

    A checkpoint is a directory of everygpu.save, a file of torch.save, a safetensors file, an index of
    shards, or a directory of torch.distributed.checkpoint, Transformers or Accelerate. Nothing in them is
    executed.
    """


for command in (convert_checkpoint, show_checkpoint, verify_checkpoint):
    checkpoint.add_command(command)
