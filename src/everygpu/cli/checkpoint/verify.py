"""``everygpu checkpoint verify``: list a checkpoint's faults."""

from pathlib import Path

import click

from everygpu.cli.output import UserPath, harmless, make_console, plain
from everygpu.cli.progress_bar import show_bar
from everygpu.units import format_size

_INVALID = 4


@click.command("verify", short_help="Check a checkpoint against its SHA256SUMS, or that it can be read.")
@click.argument("path", type=UserPath(path_type=Path))
@click.pass_context
def verify_checkpoint(context: click.Context, path: Path) -> None:
    """Check a checkpoint against its SHA256SUMS, or that it can be read.

    Exits with 4 when something is wrong with it.
    """
    from everygpu.checkpoint.verify import examine, total_bytes  # not for the help

    with show_bar(f"verifying {path.name}", total_bytes(path)) as count:
        report = examine(path, count)
    console = make_console(10_000)
    for fault in report.faults:
        console.print(plain(fault))
    if report.faults:
        console.print(plain(f"{path}: invalid"))
        context.exit(_INVALID)
    files = "1 file" if report.num_files == 1 else f"{report.num_files} files"
    console.print(f"{harmless(path)}: valid ({report.format}; {files}, {format_size(report.size_bytes)})")
