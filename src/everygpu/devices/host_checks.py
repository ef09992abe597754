"""The checks of ``everygpu doctor`` on the process and its system: pure functions of facts, as in ``checks``."""

from collections.abc import Mapping, Sequence

from everygpu.devices.checks import Finding, State
from everygpu.devices.nvml import DeviceSample
from everygpu.units import format_size

_ENOUGH_SHARED_BYTES = 2**30
_ENOUGH_FILES = 4096
_ENOUGH_LOCKED_BYTES = 2**30

# Variable, the values that matter (None for all but 0), the state, what it does, and what to do.
_VARIABLES: tuple[tuple[str, tuple[str, ...] | None, State, str, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", None, "warning", "every launch waits for its kernel; NCCL is not used", "Unset it."),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", None, "warning", "each tensor asks the driver for memory", "Unset it."),
    ("NCCL_P2P_DISABLE", ("1",), "note", "NCCL sends through host memory", "Unset it if P2P is right."),
    ("NCCL_DEBUG", ("INFO", "TRACE"), "note", "NCCL writes much to the log", "Unset it."),
    ("EVERYGPU_P2P", ("staged",), "note", "copies between GPUs go through host memory", "Unset it if P2P is right."),
    ("EVERYGPU_P2P", ("trust",), "note", "copies between GPUs are trusted without a test", "Unset it."),
)


def check_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Look at variables that slow training down."""
    return [
        Finding(check="environment", state=state, message=f"{name}={environ[name]}: {what}", fix=fix)
        for name, values, state, what, fix in _VARIABLES
        if environ.get(name, "") not in ("", "0") and (values is None or environ[name] in values)
    ]


def check_order(samples: Sequence[DeviceSample], environ: Mapping[str, str]) -> list[Finding]:
    """Look at whether torch numbers unlike GPUs as nvidia-smi does."""
    names = {sample.name for sample in samples}
    if len(names) < 2 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return []
    message = f"GPUs of {len(names)} kinds: torch numbers the fastest first, nvidia-smi by PCI address"
    fix = "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or choose by UUID: `everygpu run` does."
    return [Finding(check="environment", state="note", message=message, fix=fix)]


def check_shared_memory(total_bytes: int | None) -> list[Finding]:
    """Look at /dev/shm, through which loader workers hand over batches; None where there is none."""
    if total_bytes is None:
        return []
    message = f"/dev/shm has {format_size(total_bytes)}"
    if total_bytes >= _ENOUGH_SHARED_BYTES:
        return [Finding(check="shared memory", state="ok", message=message)]
    fix = "In a container: --shm-size=8g or --ipc=host. Else: mount -o remount,size=8G /dev/shm."
    message += ": loader workers may die with a bus error"
    return [Finding(check="shared memory", state="warning", message=message, fix=fix)]


def check_open_files(limit: int | None) -> list[Finding]:
    """Look at how many files may be open: loader workers hold several for each tensor. None for no limit."""
    if limit is None or limit >= _ENOUGH_FILES:
        return [Finding(check="open files", state="ok", message=f"{'no limit' if limit is None else limit}")]
    message = f"{limit} at most: loaders with many workers may fail with 'Too many open files'"
    return [Finding(check="open files", state="warning", message=message, fix="ulimit -n 65536")]


def check_locked_memory(limit_bytes: int | None) -> list[Finding]:
    """Look at how much memory may be pinned; None for no limit."""
    if limit_bytes is None or limit_bytes >= _ENOUGH_LOCKED_BYTES:
        shown = "no limit" if limit_bytes is None else format_size(limit_bytes)
        return [Finding(check="pinned memory", state="ok", message=shown)]
    message = f"{format_size(limit_bytes)} at most, for what isn't pinned by CUDA itself, such as InfiniBand"
    fix = "ulimit -l unlimited; in a container: --ulimit memlock=-1."
    return [Finding(check="pinned memory", state="note", message=message, fix=fix)]
