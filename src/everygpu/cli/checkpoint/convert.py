"""``everygpu checkpoint convert``: write a checkpoint's model as one file."""

from pathlib import Path

import click
import torch

from everygpu.checkpoint.convert import convert
from everygpu.checkpoint.directory import written_bytes
from everygpu.cli.output import UserPath, make_console, plain
from everygpu.cli.progress_bar import show_bar

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


@click.command("convert")
@click.argument("source", metavar="SRC", type=UserPath(path_type=Path))
@click.argument("destination", metavar="DST", type=UserPath(path_type=Path))
@click.option("--section", metavar="NAME", help="The state dict to take, where the source has several.")
@click.option("--strip-prefix", default="", metavar="TEXT", help="Take this off names that begin with it.")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), help="Cast the model's floating-point tensors.")
@click.option("--overwrite", is_flag=True, help="Replace a file of weights at DST.")
def convert_checkpoint(
    source: Path,
    destination: Path,
    section: str | None,
    strip_prefix: str,
    dtype: str | None,
    overwrite: bool,
) -> None:
    """Write the model in SRC to DST, whose name ends with .pt, .pth, .ckpt, .bin or .safetensors.

    What is at DST is replaced when the new file is complete.
    """
    with show_bar(f"reading {source.name}") as bar:
        outcome = convert(
            source,
            destination,
            section=section,
            strip_prefix=strip_prefix,
            dtype=None if dtype is None else _DTYPES[dtype],
            overwrite=overwrite,
            writing=lambda num_bytes: bar.measured(
                f"writing {destination.name}", num_bytes, lambda: written_bytes(destination)
            ),
        )
    console = make_console(10_000)
    console.print(plain(f"{destination}: {outcome.num_tensors} tensors ({outcome.format})"))
    if outcome.left_out:
        console.print(plain(f"left out: {', '.join(outcome.left_out)}"))
    for note in outcome.notes:
        console.print(plain(f"note: {note}"))
