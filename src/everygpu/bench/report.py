"""What every benchmark prints about where it ran."""

import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import everygpu


def describe_machine() -> dict[str, Any]:
    """Hardware, versions, commit and time, for the head of a report."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "everygpu": everygpu.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    }


def _commit() -> str:
    root = Path(__file__).parents[1]
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
