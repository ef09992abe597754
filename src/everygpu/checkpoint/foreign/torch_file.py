"""Files of torch.save, with ``weights_only=True`` and nothing else.

A pickle is a program. torch's restricted unpickler runs only what rebuilds tensors and plain containers; a file
that asks for more is refused. There is no way around it here, and none is tried: whoever trusts a file can allow a
single name with ``torch.serialization.add_safe_globals``, or write its tensors anew.
"""

import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch

from everygpu.checkpoint.foreign.faults import broken, refused
from everygpu.errors import EveryGPUError

_WANTED = re.compile(r"(?:unsupported GLOBAL|Unsupported global: GLOBAL|Unsupported class) (\S+)")
_MISSING_SUPPORT = re.compile(r"``(torch\.[\w.]+)``[^`]* must be imported")


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save, of the present format or the one before torch 1.6.

    Args:
        path: An existing file.
    Returns:
        What was saved; tensors on the CPU, backed by the file where its format allows.
    Raises:
        CheckpointForeignError: it needs more than tensors and plain containers, or is a TorchScript archive.
        CheckpointDamagedError: it is cut off or altered.
    Source:
        ``torch.load(weights_only=True, mmap=True)``.
    """
    # torch.load maps only what it gets by name, and takes a name that ends so for another format.
    if _is_archive(path) and _check_archive(path) and path.suffix != ".safetensors":
        return load_weights(path, path, mmap=True)
    with open(path, "rb") as file:
        return load_weights(file, path)


def load_weights(source: Path | BinaryIO, path: Path, *, mmap: bool = False) -> Any:
    """Run torch's restricted unpickler.

    Args:
        source: What to read.
        path: The file to name in errors.
        mmap: Whether tensors shall be backed by the file.
    Raises:
        CheckpointForeignError: the content needs more than tensors and plain containers.
        CheckpointDamagedError: it is cut off or altered.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except UnpicklingError as cause:
        raise _explain(path, str(cause)) from cause
    except Exception as cause:  # altered bytes come out of torch as errors of any type
        raise broken(path, f"torch.load can't read ({_first_line(cause)})") from cause


def find_archive_fault(path: Path) -> str | None:
    """Compare the checksums that torch.save wrote with the content; torch.load itself does not.

    Args:
        path: A file that `read_torch_file` reads.
    Returns:
        What differs; None where nothing does, or there are no checksums: in files of the old format, and
        those written under ``torch.serialization.set_crc32_options(False)``.
    """
    if not _is_archive(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            has_checksums = any(entry.CRC for entry in archive.infolist())
            altered = archive.testzip() if has_checksums else None
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as cause:
        return f"can't be read as the archive it is ({cause})"
    return None if altered is None else f"was altered in {altered}: its checksum differs"


def _is_archive(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _check_archive(path: Path) -> bool:
    """Refuse archives of other kinds; tell whether the file can be mapped into memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as cause:
        raise broken(path, f"is cut off or altered ({cause})") from cause
    names = [entry.filename for entry in entries]
    if any(name.endswith("/constants.pkl") for name in names):
        raise refused(
            path,
            "a TorchScript archive, which holds code",
            "Where you trust it, save its weights: torch.save(torch.jit.load(path).state_dict(), new).",
        )
    if not any(name.endswith("/data.pkl") for name in names):
        raise refused(path, "an archive that torch.save did not write", "Pass the file that it did write.")
    # Mapped, a compressed tensor would be its compressed bytes.
    return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _explain(path: Path, message: str) -> EveryGPUError:
    wanted, support = _WANTED.search(message), _MISSING_SUPPORT.search(message)
    if support is not None:
        return refused(
            path, f"which holds tensors of {support[1]}", f"Import {support[1]} first, or save ordinary tensors."
        )
    if wanted is not None:
        return refused(
            path,
            f"which wants to run {wanted[1].rstrip('.')}",
            "Nothing of it was run. Ask for a file with only a state_dict; if you know this name to be harmless, allow "
            "it with torch.serialization.add_safe_globals before loading.",
        )
    return broken(
        path, f"torch's restricted unpickler can't read ({_first_line(message.split('WeightsUnpickler')[-1])})"
    )


def _first_line(cause: object) -> str:
    text = str(cause).strip().splitlines() or [repr(cause)]
    return text[0][:200]
