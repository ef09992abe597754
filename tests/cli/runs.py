"""``everygpu run`` in processes of its own, on a machine whose driver is a stand-in."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Found before the real pynvml: the commands know nothing of it.
FAKE_PYNVML = """
import sys
sys.path.append({root!r})
from tests.devices.fake_nvml import GIB, FakeNvml, Gpu, two_h200s
sys.modules["pynvml"] = FakeNvml({gpus})
"""


def install_driver(folder, gpus="*two_h200s(used=9 * GIB)"):
    """Put a stand-in for the driver into a folder, or change the one there: an expression for its GPUs."""
    (folder / "pynvml.py").write_text(FAKE_PYNVML.format(root=str(ROOT), gpus=gpus))


def command_of(*arguments, fake_gpus=None, **environ):
    """Make the arguments of ``subprocess`` for ``everygpu …`` as a user would type it.

    ``fake_gpus`` is the folder of a driver's stand-in; reservations are made there too.
    """
    inherited = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name}
    inherited.pop("CUDA_DEVICE_ORDER", None)
    path = [str(ROOT / "src")]
    if fake_gpus is not None:
        path.insert(0, str(fake_gpus))
        environ.setdefault("XDG_RUNTIME_DIR", str(fake_gpus))
    return {
        "args": [sys.executable, "-m", "everygpu", *map(str, arguments)],
        "env": {**inherited, "PYTHONPATH": os.pathsep.join(path), **environ},
        "text": True,
    }


def everygpu(*arguments, cwd=None, **options):
    """Run a command to its end."""
    return subprocess.run(**command_of(*arguments, **options), cwd=cwd, capture_output=True, check=False)
