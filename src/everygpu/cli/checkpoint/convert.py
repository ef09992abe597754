"""``everygpu checkpoint convert``: write a checkpoint's model as one file."""

from pathlib import Path

import click

from everygpu.cli.output import UserPath, make_console, plain
from everygpu.cli.progress_bar import show_bar


@click.command("convert", short_help="Write the model in SRC to DST, as safetensors or .pt.")
@click.argument("source", metavar="SRC", type=UserPath(path_type=Path))
@click.argument("destination", metavar="DST", type=UserPath(path_type=Path))
@click.option("--section", metavar="NAME", help="The state dict to take, where the source has several.")
@click.option("--strip-prefix", default="", metavar="TEXT", help="Take this off names that begin with it.")
@click.option("--overwrite", is_flag=True, help="Replace the file at DST.")
def convert_checkpoint(
    source: Path, destination: Path, section: str | None, strip_prefix: str, overwrite: bool
) -> None:
    """Write the model in SRC to DST, whose name ends with .pt, .pth, .ckpt, .bin or .safetensors.

    What is at DST is replaced when the new file is complete.
    """
    from everygpu.checkpoint.convert import convert  # not for the help

    with show_bar(f"converting {source.name}"):
        outcome = convert(source, destination, section=section, strip_prefix=strip_prefix, overwrite=overwrite)
    console = make_console(10_000)
    console.print(plain(f"{destination}: {outcome.num_tensors} tensors ({outcome.format})"))
    if outcome.left_out:
        console.print(plain(f"left out: {', '.join(outcome.left_out)}"))
    for note in outcome.notes:
        console.print(plain(f"note: {note}"))
