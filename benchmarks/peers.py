"""`everygpu bench` on the models of our reports, with a dated report of it in benchmarks/reports/.

    python benchmarks/peers.py [options of `everygpu bench`]

Writes JSON, Markdown and, where matplotlib is installed, a plot. `--commit` names the commit on machines without git.
"""

import importlib.util
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from everygpu.cli import main

REPORTS = Path(__file__).parent / "reports"


def name_files(folder: Path) -> list[str]:
    """Make the options that say where to write; they can be given again, as the last one counts."""
    name = f"{datetime.now(timezone.utc):%Y-%m-%d}-peers-{torch.cuda.device_count()}-gpus"
    options = ["--json", str(folder / f"{name}.json"), "--report", str(folder / f"{name}.md")]
    return [*options, "--plot", str(folder / f"{name}.png")] if importlib.util.find_spec("matplotlib") else options


if __name__ == "__main__":
    main(["bench", *name_files(REPORTS), *sys.argv[1:]], prog_name="everygpu")
