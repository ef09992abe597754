"""Faults of many kinds, one after another: whole checkpoints, equal losses, nothing left.

``python tests/faults/soak.py`` draws hundreds of them: docs/reliability.md shows what it found.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals, and reads /proc"),
]
PLAN = (
    "exception in forward@5,out of memory in backward@6,exception in a worker@8,full disk@9,"
    "kill -9 and a bit flipped@12,SIGTERM@14"
)


def soak(tmp_path: Path, *options: str) -> list[dict[str, object]]:
    """Put faults on trainings; return each run's record."""
    report = tmp_path / "report.json"
    command = [sys.executable, "tests/faults/soak.py", *options, "--json", str(report)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    records: list[dict[str, object]] = json.loads(report.read_text()) if report.exists() else []
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    return records


def test_one_fault_after_another(tmp_path: Path) -> None:
    records = soak(tmp_path, "--plan", PLAN)
    done = [fault["kind"] for record in records for fault in record["faults"]]  # type: ignore[attr-defined]
    assert len(done) == len(PLAN.split(","))
    assert not [record["wrong"] for record in records if record["wrong"]]


@pytest.mark.timeout(3600)
def test_a_hundred_faults(tmp_path: Path) -> None:
    records = soak(tmp_path, "--faults", "100", "--seed", "22")
    assert sum(len(record["faults"]) for record in records) >= 100  # type: ignore[arg-type]
