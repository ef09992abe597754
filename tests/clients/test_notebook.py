"""The notebook of examples/ in a kernel of its own, as Jupyter runs it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
EXECUTE = "from nbclient.cli import main; main()"  # jupyter execute


def outputs(path):
    """Give what each cell prints or returns; its fractions differ from machine to machine."""
    shown = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        texts = [output.get("text") or output["data"]["text/plain"] for output in cell.get("outputs", [])]
        shown.append(re.sub(r"\d+\.\d+", "#", "".join("".join(text) for text in texts)))
    return shown


def test_shows_what_it_showed(tmp_path):
    copy = shutil.copy(NOTEBOOK, tmp_path)
    # Its outputs are those of two replicas on the CPU.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", EXECUTE, "--inplace", "--kernel_name=python3", str(copy)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert outputs(Path(copy)) == outputs(NOTEBOOK)
    assert Path(copy).read_bytes() != NOTEBOOK.read_bytes()  # it was run
    assert (tmp_path / "checkpoints" / "spirals" / "checkpoint.json").exists()
