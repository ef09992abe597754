"""Files of torch.save, with ``weights_only=True`` and nothing else.

A pickle is a program. torch's restricted unpickler runs only what rebuilds tensors and plain containers; a file
that asks for more is refused. This module has no switch around it. For a file that is trusted, allow a
single name with ``torch.serialization.add_safe_globals``, or save its tensors anew.
"""

import io
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch

from everygpu.checkpoint.brief import cut
from everygpu.checkpoint.foreign.bounds import max_unfolded_bytes
from everygpu.checkpoint.foreign.faults import broken, refused
from everygpu.checkpoint.foreign.pickle_scan import scan_pickle
from everygpu.checkpoint.regular_file import MAX_DOCUMENT_BYTES, open_regular
from everygpu.errors import CheckpointError, EveryGPUError

_ARCHIVE = b"PK\x03\x04"
_READ_BYTES = 2**20
_ZIP_ERRORS = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""RuntimeError: a member is encrypted, or packed in a way that this Python does not know."""

_WANTED = re.compile(r"(?:unsupported GLOBAL|Unsupported global: GLOBAL|Unsupported class) (\S+)")
_FRAME = "Unsupported operand 149"
"""What torch says of the first instruction that every pickle of protocol 4 or later has, and no earlier one."""

_MISSING_SUPPORT = re.compile(r"``(torch\.[\w.]+)``[^`]* must be imported")


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save, of the present format or the one before torch 1.6.

    Args:
        path: An existing file.
    Returns:
        The saved object; tensors on the CPU, backed by the file where its format allows.
    Raises:
        CheckpointForeignError: it needs more than tensors and plain containers, or is a TorchScript archive.
        CheckpointDamagedError: it is cut off or altered.
    Source:
        ``torch.load(weights_only=True, mmap=True)``.
    """
    with open_regular(path) as file:
        can_map = _check(file, path)
        # torch.load maps only what it gets by name, and takes a name that ends so for another format.
        if can_map and path.suffix != ".safetensors":
            return _load(path, path, mmap=True)
        return _load(file, path)


def read_torch_bytes(data: bytes, path: Path) -> Any:
    """Read what torch.save wrote, as a part of a file.

    Args:
        data: The part.
        path: The file to name in errors.
    Raises:
        CheckpointError: as `read_torch_file`.
    """
    file = io.BytesIO(data)
    _check(file, path)
    return _load(file, path)


def _check(file: BinaryIO, path: Path) -> bool:
    """See that torch.load will need no more than the file holds; tell whether the file can be mapped into memory."""
    try:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
        file.seek(0)
        can_map = _check_archive(file, size, path) if is_archive else _check_pickles(file, size, path)
        file.seek(0)
    except OSError as cause:
        raise broken(path, f"can't be read ({cause.strerror})") from cause
    return can_map


def _check_pickles(file: BinaryIO, size: int, path: Path) -> bool:
    """Check the format before torch 1.6: five pickles, the first of them a number, and the tensors behind."""
    size = min(size, MAX_DOCUMENT_BYTES)
    if scan_pickle(file, size, path) == torch.serialization.MAGIC_NUMBER:  # else torch reads no further either
        for _ in range(4):
            scan_pickle(file, size - file.tell(), path)
    return False


def _load(source: Path | BinaryIO, path: Path, *, mmap: bool = False) -> Any:
    """Run torch's restricted unpickler."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except UnpicklingError as cause:
        raise _explain(path, str(cause)) from cause
    except Exception as cause:  # altered bytes come out of torch as errors of any type
        raise broken(path, f"torch.load can't read ({_first_line(cause)})") from cause


def find_archive_fault(path: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> str | None:
    """Compare the checksums that torch.save wrote with the content; torch.load itself does not.

    Args:
        path: A file that `read_torch_file` reads.
        advance: Called with the number of bytes that were compared since the last call.
    Returns:
        What differs; None where nothing does, or there are no checksums: in files of the old format, and
        those written under ``torch.serialization.set_crc32_options(False)``.
    """
    try:
        with open_regular(path) as file:
            if file.read(len(_ARCHIVE)) != _ARCHIVE:
                return None
            with zipfile.ZipFile(file) as archive:
                has_checksums = any(entry.CRC for entry in archive.infolist())
                altered = _find_altered(archive, advance) if has_checksums else None
    except _ZIP_ERRORS as cause:
        return f"can't be read as the archive it is ({cut(str(cause))})"
    return None if altered is None else f"was altered in {cut(altered)}: its checksum differs"


def _find_altered(archive: zipfile.ZipFile, advance: Callable[[int], None]) -> str | None:
    """Do as ``ZipFile.testzip``, and say how far it has come."""
    for entry in archive.infolist():
        try:
            with archive.open(entry) as content:
                while data := content.read(_READ_BYTES):
                    advance(len(data))
        except zipfile.BadZipFile:
            return entry.filename
    return None


def _check_archive(file: BinaryIO, size: int, path: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            _check_members(entries, size, path)
            pickled = _find_pickle([entry.filename for entry in entries], path)
            data = archive.read(pickled)
            scan_pickle(io.BytesIO(data), len(data), path)
    except CheckpointError:
        raise
    except _ZIP_ERRORS as cause:
        raise broken(path, f"is cut off or altered ({cause})") from cause
    # Mapped, a compressed tensor would be its compressed bytes.
    return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _check_members(entries: list[zipfile.ZipInfo], size: int, path: Path) -> None:
    """See that all members together are no more than the file holds, and that torch's reader will find the same ones.

    torch compresses nothing; archives that were packed anew may be compressed a little.
    """
    if sum(entry.compress_size for entry in entries) > size:
        raise broken(path, "has members that overlap")
    num_bytes = sum(entry.file_size for entry in entries)
    if num_bytes > max_unfolded_bytes(size):
        raise broken(path, f"has {size} bytes and unpacks to {num_bytes}")
    # torch reads all but the tensors as a whole; a sparse file may have gigabytes of nothing there.
    others = [entry for entry in entries if "/data/" not in entry.filename]
    if any(entry.file_size > MAX_DOCUMENT_BYTES for entry in others):
        raise broken(path, f"has a member of more than {MAX_DOCUMENT_BYTES} bytes beside its tensors")
    if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
        raise broken(path, "is compressed in a way that torch.load can't read")
    # torch finds members without regard to case, and knows nothing of archives with something before them.
    names = {entry.filename.lower() for entry in entries}
    if len(names) < len(entries) or min((entry.header_offset for entry in entries), default=0) > 0:
        raise broken(path, "is no archive that can be read in one way only")


def _find_pickle(names: list[str], path: Path) -> str:
    """Find the pickle in an archive's members, and refuse archives of other kinds."""
    if any(name.endswith("/constants.pkl") for name in names):
        raise refused(
            path,
            "a TorchScript archive, which holds code",
            "Where you trust it, save its weights: torch.save(torch.jit.load(path).state_dict(), new).",
        )
    pickles = [name for name in names if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise refused(path, "an archive that torch.save did not write", "Pass the file that it did write.")
    return pickles[0]


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
    if _FRAME in message:
        return refused(
            path,
            "whose pickle is of protocol 4 or later, of which torch's restricted unpickler reads nothing",
            "Where you trust the file, read it with torch.load(path, weights_only=False), or with pickle.load where "
            "torch did not write it, and save it anew: torch.save(state_dict, new_path).",
        )
    return broken(
        path, f"torch's restricted unpickler can't read ({_first_line(message.split('WeightsUnpickler')[-1])})"
    )


def _first_line(cause: object) -> str:
    text = str(cause).strip().splitlines() or [repr(cause)]
    return text[0][:200]
