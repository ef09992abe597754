"""What the kernels note of sums, for machines with Triton and without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, whose interpreter is used")
@pytest.mark.timeout(300)
def test_sums_are_looked_at() -> None:
    # Triton chooses its interpreter when it is imported.
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    command = [sys.executable, str(Path(__file__).parent / "interpreted.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as torch") == 192
