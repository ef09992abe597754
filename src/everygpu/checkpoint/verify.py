"""Find all faults of a checkpoint, without loading it into a model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everygpu.checkpoint import manifest as files
from everygpu.checkpoint.contents import NATIVE_FORMAT, read_native
from everygpu.checkpoint.digests import CHUNK_BYTES, hash_chunk
from everygpu.checkpoint.directory import find_directory
from everygpu.checkpoint.foreign import read_foreign
from everygpu.checkpoint.foreign.formats import DCP_METADATA, Place, is_native, locate
from everygpu.checkpoint.foreign.sharded import read_weight_map
from everygpu.checkpoint.foreign.torch_file import find_archive_fault
from everygpu.checkpoint.regular_file import require_regular
from everygpu.checkpoint.run_directory import is_run_directory, list_saved
from everygpu.errors import CheckpointError

_NATIVE_MEANS = "sizes and SHA-256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something wrong with one file."""

    file: str
    """Its name; the checkpoint's own where it is not a certain file."""
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The checks made on a checkpoint, and the faults found."""

    format: str
    num_files: int
    size_bytes: int
    means: str
    """The reference the content was compared with."""
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
    if is_run_directory(path):
        return _examine_run(path, advance)
    if not path.exists() or is_native(path):
        return _examine_native(find_directory(path), advance)
    try:
        return _examine_foreign(path, advance)
    except CheckpointError as error:  # of no format that is known
        return _report("unknown", [], "format", [_fault(path.name, error)])


def total_bytes(path: Path) -> int:
    """Sum the sizes of the files that `examine` reads; 0 where nothing is there."""
    if is_run_directory(path):  # without an earlier run that was set aside in it
        return sum(total_bytes(saved.path) for saved in list_saved(path))
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def _examine_run(path: Path, advance: Callable[[int], None]) -> Report:
    """Examine every checkpoint of a run."""
    reports = {saved.path.name: _examine_native(saved.path, advance) for saved in list_saved(path)}
    faults = [
        Fault(file=f"{name}/{fault.file}", problem=fault.problem)
        for name, report in reports.items()
        for fault in report.faults
    ]
    return Report(
        format=f"{NATIVE_FORMAT}, {len(reports)} checkpoints of a run",
        num_files=sum(report.num_files for report in reports.values()),
        size_bytes=sum(report.size_bytes for report in reports.values()),
        means=_NATIVE_MEANS,
        faults=tuple(faults),
    )


def _examine_native(directory: Path, advance: Callable[[int], None]) -> Report:
    try:
        manifest = files.read_sealed_manifest(directory)
    except CheckpointError as error:
        return _report(NATIVE_FORMAT, [], _NATIVE_MEANS, [_fault(files.MANIFEST_FILE, error)])
    checked = {name: _check_file(directory / name, record, advance) for name, record in manifest.files.items()}
    faults = [fault for fault in checked.values() if fault is not None]
    if not faults:  # each of the files is as the manifest says: now what is in them
        try:
            read_native(directory)
        except CheckpointError as error:
            faults.append(_fault(directory.name, error))
    present = [path for name in manifest.files if (path := directory / name).is_file()]
    return _report(NATIVE_FORMAT, present, _NATIVE_MEANS, faults)


def _check_file(path: Path, record: files.FileRecord, advance: Callable[[int], None]) -> Fault | None:
    try:
        actual = require_regular(path).st_size
        if actual != record.size_bytes:
            return Fault(file=path.name, problem=f"has {actual} bytes where {record.size_bytes} were written")
        for begin, digest in zip(range(0, actual, CHUNK_BYTES), record.sha256):
            end = min(begin + CHUNK_BYTES, actual)
            if hash_chunk(path, begin) != digest:
                problem = f"was altered between its bytes {begin} and {end}: its SHA-256 differs from the manifest's"
                return Fault(file=path.name, problem=problem)
            advance(end - begin)
    except OSError as error:
        return Fault(file=path.name, problem=f"can't be read ({error.strerror})")
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
        rest = _Rest(file.stat().st_size, advance)
        problem = find_archive_fault(file, rest.take) if has_archives else None
        if problem is not None:
            faults.append(Fault(file=file.name, problem=problem))
        rest.take(rest.num_bytes)  # what no checksum is of
    means = "structure, and checksums where torch.save wrote them" if has_archives else "structure; it has no checksums"
    return _report(words, members, means, faults)


@dataclass(slots=True)
class _Rest:
    """The part of a file that is still to be read."""

    num_bytes: int
    advance: Callable[[int], None]

    def take(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self.advance(num_bytes)


def _report(words: str, members: list[Path], means: str, faults: list[Fault]) -> Report:
    size = sum(file.stat().st_size for file in members)
    return Report(format=words, num_files=len(members), size_bytes=size, means=means, faults=tuple(faults))


def _members(place: Place) -> list[Path]:
    """List the files that a foreign checkpoint consists of."""
    if place.format == "dcp":
        return [place.path / DCP_METADATA, *sorted(file for file in place.path.glob("*.distcp") if file.is_file())]
    shards = set(read_weight_map(place.path).values()) if place.format == "index" else set()
    return [place.path, *sorted(shards)]


def _fault(file: str, error: CheckpointError) -> Fault:
    return Fault(file=file, problem=str(error))
