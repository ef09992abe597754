"""``everygpu doctor``: faults that keep GPUs from working or from being fast, each with its remedy."""

import json
import os
import sys
from dataclasses import asdict

import click
from rich.table import Table

from everygpu.cli.live import make_console
from everygpu.cli.progress_bar import show_bar
from everygpu.cli.text import harmless
from everygpu.devices.checks import Finding
from everygpu.devices.peer_run import Outcome, PairReport

_SIGNS = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "error": "ERROR  "}
_UNUSABLE = 3


@click.command("doctor")
@click.option("--quick", is_flag=True, help="Don't copy between the GPUs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def find_faults(quick: bool, as_json: bool) -> None:
    """Find what keeps the GPUs from being used, or from being fast.

    Looks at versions, health and limits, and copies known bytes between every two GPUs. What it finds out about
    copies is what training goes by from then on. Exit code 3 means that the GPUs can't be used.
    """
    from everygpu.devices.doctor import diagnose

    with show_bar("looking at drivers and torch", unit="pairs", quiet=as_json) as bar:

        def show_pairs(num_pairs: int, num_all: int) -> None:
            bar.update("copying between GPUs", completed=num_pairs, total=num_all)

        diagnosis = diagnose(os.environ, test_peers=not quick, on_pair=show_pairs)
    console = make_console()
    if as_json:
        pairs = {} if diagnosis.peers is None else diagnosis.peers.pairs
        report = {
            "usable": diagnosis.is_usable,
            "findings": [asdict(finding) for finding in diagnosis.findings],
            "pairs": [{"source": i, "target": j, **asdict(pair)} for (i, j), pair in pairs.items()],
        }
        console.out(json.dumps(report, indent=2), highlight=False)
    else:
        for finding in diagnosis.findings:
            console.out(harmless(describe(finding), keep="\n"), highlight=False)
        if diagnosis.peers is not None:
            console.print(build_matrix(diagnosis.peers))
    sys.exit(0 if diagnosis.is_usable else _UNUSABLE)


def describe(finding: Finding) -> str:
    """Write a finding as one line, or two with what to do."""
    line = f"{_SIGNS[finding.state]} {finding.check}: {finding.message}"
    return line if finding.fix is None else f"{line}\n        {finding.fix}"


def build_matrix(peers: Outcome) -> Table:
    """Lay out what came of copying from each GPU (a row) to each (a column)."""
    positions = sorted({position for pair in peers.pairs for position in pair})
    table = Table("GB/s", *(f"to {j}" for j in positions), highlight=False)
    for i in positions:
        table.add_row(f"from {i}", *("" if i == j else _cell(peers.pairs[i, j]) for j in positions))
    return table


def _cell(report: PairReport) -> str:
    if report.verdict != "right":
        return report.verdict
    return "right" if report.gigabytes_per_s is None else f"{report.gigabytes_per_s:g}"
