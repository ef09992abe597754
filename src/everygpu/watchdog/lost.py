"""Whether an error means that a GPU is lost, or that this process can't use it any more."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

from everygpu.devices import nvml
from everygpu.errors import ReplicaError

NVML_S = 5.0
"""NVML, which a GPU that has fallen off the bus may hold up, has this long to answer."""
LOST = frozenset({46, 100, 214, 220, 226, 700, 702, 709, 714, 715, 716, 717, 718, 719, 721, 999})
"""Codes of ``cudaError_t`` after which each call of the process fails: faults of memory, links and kernels, GPUs that
are not there. Not among them are those of one call, such as a wrong argument, and 710, ``cudaErrorAssert``: another try
would meet the same index out of range again."""


def find_loss(error: BaseException) -> str | None:
    """Say which GPU is lost, and by which error, if one is; make no call of CUDA's.

    Args:
        error: Has reached the end of the script.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not any(isinstance(e, RuntimeError) for e in _chain(error)):
        return None
    raised = [e for e in _chain(error) if isinstance(e, torch.AcceleratorError)]
    codes = [code for e in raised if (code := getattr(e, "error_code", None)) is not None]
    gone = _ask_nvml() if codes or torch.cuda.is_initialized() else []
    code = next((code for code in codes if code in LOST), None)
    if code is None and not gone:
        return None
    where = next((str(e).partition(" failed")[0] for e in _chain(error) if isinstance(e, ReplicaError)), "")
    found = [f"CUDA's error {code}" if code is not None else "", where.replace("forward: ", "in "), *gone]
    return (
        f"a GPU must go on working, got {', '.join(text for text in found if text)}: this process can't use it any "
        f"more. Start again from the newest checkpoint, as everygpu run --restarts does; `dmesg | grep -i xid` has the "
        f"driver's reason, where the GPU is at fault."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _ask_nvml() -> list[str]:
    """Name the GPUs that don't answer the driver's library."""
    answers: list[list[str]] = []
    thread = threading.Thread(target=lambda: answers.append(nvml.find_lost()), daemon=True)
    thread.start()
    thread.join(NVML_S)
    if not answers:
        return [f"no answer of NVML in {NVML_S:g} s"] if thread.is_alive() else []
    return answers[0]
