"""``everygpu doctor``: faults that keep GPUs from working or from being fast, each with its remedy."""

import json
import os
import sys
from dataclasses import asdict

import click

from everygpu.cli.output import harmless, make_console, show_bar
from everygpu.exit_codes import NO_DEVICE

_SIGNS = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "error": "ERROR  "}


@click.command("doctor")
@click.option("--quick", is_flag=True, help="Skip the copies between GPUs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(quick: bool, as_json: bool) -> None:
    """Find what keeps the GPUs from working, or slows them down.

    Checks versions, health and limits, and copies known bytes between every two GPUs; training then trusts the
    result. Exit code 3: the GPUs can't be used.
    """
    with show_bar("looking at drivers, torch and GPUs", quiet=as_json):
        from everygpu.devices.doctor import diagnose

        diagnosis = diagnose(os.environ, test_peers=not quick)
    console = make_console()
    if as_json:
        report = {
            "usable": diagnosis.is_usable,
            "findings": [asdict(finding) for finding in diagnosis.findings],
            "pairs": [{"source": i, "target": j, **asdict(pair)} for (i, j), pair in (diagnosis.peers or {}).items()],
        }
        console.out(json.dumps(report, indent=2))
    else:
        for finding in diagnosis.findings:
            fix = "" if finding.fix is None else f"\n        {finding.fix}"
            console.out(harmless(f"{_SIGNS[finding.state]} {finding.check}: {finding.message}{fix}", keep="\n"))
    sys.exit(0 if diagnosis.is_usable else NO_DEVICE)
