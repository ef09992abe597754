"""``everygpu checkpoint convert``: write a checkpoint in another format."""

import os
from pathlib import Path

import click
import torch

from everygpu.checkpoint.convert import Target, convert
from everygpu.checkpoint.directory import written_bytes
from everygpu.cli.checkpoint.console import open_console
from everygpu.cli.paths import UserPath
from everygpu.cli.progress_bar import show_bar
from everygpu.cli.text import plain

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


@click.command("convert")
@click.argument("source", metavar="SRC", type=UserPath(path_type=Path))
@click.argument("destination", metavar="DST", type=UserPath(path_type=Path))
@click.option(
    "--to",
    "target",
    type=click.Choice(["everygpu", "torch", "safetensors", "dcp"]),
    help="The format; by default as DST ends: .pt, .pth, .ckpt, .bin, .safetensors, else an everygpu directory.",
)
@click.option("--section", metavar="NAME", help="The state dict to take, where the source has several.")
@click.option("--strip-prefix", default="", metavar="TEXT", help="Take this off names that begin with it.")
@click.option("--add-prefix", default="", metavar="TEXT", help="Put this before every name.")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), help="Cast the model's floating-point tensors.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DST.")
def convert_checkpoint(
    source: Path,
    destination: Path,
    target: Target | None,
    section: str | None,
    strip_prefix: str,
    add_prefix: str,
    dtype: str | None,
    overwrite: bool,
) -> None:
    """Write SRC to DST in another format, or under other names.

    An everygpu directory gets every part; the other formats get the model's state dict. What is at DST is
    replaced when the new one is complete.
    """
    target_path = Path(os.path.realpath(destination))
    with show_bar(f"reading {source.name}") as bar:
        outcome = convert(
            source,
            destination,
            target=target,
            section=section,
            strip_prefix=strip_prefix,
            add_prefix=add_prefix,
            dtype=None if dtype is None else _DTYPES[dtype],
            overwrite=overwrite,
            writing=lambda num_bytes: bar.measured(
                f"writing {destination.name}", num_bytes, lambda: written_bytes(target_path)
            ),
        )
    console = open_console()
    console.print(plain(f"{destination}: {outcome.num_tensors} tensors ({outcome.target})"))
    for what in outcome.left_out:
        console.print(plain(f"left out: {what}"))
    for note in outcome.notes:
        console.print(plain(f"note: {note}"))
