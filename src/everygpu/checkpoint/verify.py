"""Look for faults in a checkpoint, all of them, without loading it into anything."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everygpu.checkpoint import manifest as files
from everygpu.checkpoint.contents import NATIVE_FORMAT, read_native
from everygpu.checkpoint.directory import find_directory
from everygpu.checkpoint.foreign import read_foreign
from everygpu.checkpoint.foreign.formats import DCP_METADATA, Place, is_native, locate
from everygpu.checkpoint.foreign.sharded import read_weight_map
from everygpu.checkpoint.foreign.torch_file import find_archive_fault
from everygpu.errors import CheckpointError

_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something wrong with one file."""

    file: str
    """Its name; the checkpoint's own where it is not a certain file."""
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a checkpoint was examined for, and what was found."""

    format: str
    num_files: int
    size_bytes: int
    means: str
    """What the content was compared with."""
    faults: tuple[Fault, ...]


def examine(path: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> Report:
    """Check everything about a checkpoint that can be checked.

    Args:
        path: A checkpoint of any format.
        advance: Called with the number of bytes that were read since the last call.
    Returns:
        The faults; none where every check was passed.
    Raises:
        CheckpointNotFoundError: nothing is there.
    """
    if not path.exists() or is_native(path):
        return _examine_native(find_directory(path), advance)
    try:
        return _examine_foreign(path, advance)
    except CheckpointError as error:  # of no format that is known
        return _report("unknown", [], "format", [_fault(path.name, error)])


def total_bytes(path: Path) -> int:
    """Sum the sizes of the files that `examine` reads; 0 where nothing is there."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())


def hash_file(path: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Return a file's sha256 as lower-case hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _examine_native(directory: Path, advance: Callable[[int], None]) -> Report:
    records = list(_records(directory))
    faults = [fault for record in records if (fault := _check_file(directory, *record, advance)) is not None]
    if not faults:  # each of the files is as the manifest says: now what is in them
        try:
            read_native(directory)
        except CheckpointError as error:
            faults.append(_fault(directory.name, error))
    is_hashed = bool(records) and all(digest is not None for _, _, digest in records)
    present = [path for name, _, _ in records if (path := directory / name).is_file()]
    means = "sizes and sha256" if is_hashed else "sizes and structure; its manifest has no sha256"
    return _report(NATIVE_FORMAT, present, means, faults)


def _records(directory: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, size and digest of the files that a manifest lists, as far as it can be read."""
    try:
        document = files.read_json(directory / files.MANIFEST_FILE)
    except CheckpointError:
        return
    listed = document.get("files") if isinstance(document, dict) else None
    for name, record in listed.items() if isinstance(listed, dict) else ():
        if name in files.FILE_NAMES and isinstance(record, dict):
            yield name, record.get("size_bytes"), record.get("sha256")


def _check_file(directory: Path, name: str, size: Any, digest: Any, advance: Callable[[int], None]) -> Fault | None:
    path = directory / name
    try:
        actual = path.stat().st_size
        if actual != size:
            return Fault(file=name, problem=f"has {actual} bytes where {size} were written")
        if digest is not None and hash_file(path, advance) != digest:
            return Fault(file=name, problem="was altered: its sha256 differs from the manifest's")
    except OSError as error:
        return Fault(file=name, problem=f"can't be read ({error.strerror})")
    return None


def _examine_foreign(path: Path, advance: Callable[[int], None]) -> Report:
    place = locate(path)
    members: list[Path] = []
    try:
        members = _members(place)
        words = read_foreign(path).format
    except CheckpointError as error:
        return _report(place.format, members, "structure", [_fault(path.name, error)])
    has_archives = place.format in ("torch", "index")
    faults = []
    for file in members:
        problem = find_archive_fault(file) if has_archives else None
        if problem is not None:
            faults.append(Fault(file=file.name, problem=problem))
        advance(file.stat().st_size)
    means = "structure, and checksums where torch.save wrote them" if has_archives else "structure; it has no checksums"
    return _report(words, members, means, faults)


def _report(words: str, members: list[Path], means: str, faults: list[Fault]) -> Report:
    size = sum(file.stat().st_size for file in members)
    return Report(format=words, num_files=len(members), size_bytes=size, means=means, faults=tuple(faults))


def _members(place: Place) -> list[Path]:
    """List the files that a foreign checkpoint consists of."""
    if place.format == "dcp":
        return [place.path / DCP_METADATA, *sorted(place.path.glob("*.distcp"))]
    shards = set(read_weight_map(place.path).values()) if place.format == "index" else set()
    return [place.path, *sorted(shards)]


def _fault(file: str, error: CheckpointError) -> Fault:
    return Fault(file=file, problem=str(error))
