"""Faults of many kinds, one after another: whole checkpoints, equal losses, nothing left.

``python -m tests.faults.soak`` draws hundreds of them: docs/reliability.md shows what it found.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals, and reads /proc"),
]
PLAN = (
    "exception in forward@5,out of memory in backward@6,exception in a worker@8,full disk@9,"
    "too many open files@10,kill -9 in a save@12,SIGTERM@14"
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("options", "least"), [(["--plan", PLAN], 7), (["--faults", "100", "--seed", "22"], 100)])
def test_one_fault_after_another(options: list[str], least: int) -> None:
    command = [sys.executable, "-m", "tests.faults.soak", *options]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert int(done.stdout.splitlines()[-1].removesuffix(" faults")) >= least
