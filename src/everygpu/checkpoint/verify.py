"""Find all faults of a checkpoint, without loading it into a model."""

from dataclasses import dataclass
from pathlib import Path

from everygpu.checkpoint.directory import is_run_directory, list_saved
from everygpu.checkpoint.foreign import find_archive_fault, list_files, read_foreign
from everygpu.checkpoint.format import FORMAT, Advance, find_altered, is_claimed, read_document, require_there
from everygpu.checkpoint.load import read_native
from everygpu.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was compared, and the faults that were found."""

    format: str
    num_files: int
    size_bytes: int
    faults: tuple[str, ...]


def examine(path: Path, advance: Advance = lambda num_bytes: None) -> Report:
    """Check all of a checkpoint that can be checked."""
    if is_run_directory(path):
        saved = [one.path for one in list_saved(path)]
        words = f"{FORMAT}, {len(saved)} checkpoint{'s' * (len(saved) > 1)} of a run; SHA-256"
        return _report(words, saved, [fault for one in saved for fault in _faults_of_ours(one, advance)])
    require_there(path)
    if is_claimed(path):
        return _report(f"{FORMAT}; SHA-256", [path], _faults_of_ours(path, advance))
    faults = []
    try:
        words, _, *files = list_files(path)
        read_foreign(path)
    except CheckpointError as error:
        return _report("unknown", [path], [str(error)])
    for file in files:
        if problem := find_archive_fault(file):
            faults.append(f"{file} {problem}")
        advance(file.stat().st_size)
    return _report(f"{words}; structure, and checksums where torch.save wrote them", files, faults)


def total_bytes(path: Path) -> int:
    """Sum the sizes of the files that `examine` reads; 0 where nothing is there."""
    places = [saved.path for saved in list_saved(path)] if is_run_directory(path) else [path]
    return sum(file.stat().st_size for file in _files_in(places))


def _faults_of_ours(directory: Path, advance: Advance) -> list[str]:
    try:
        faults = [str(error) for error in find_altered(directory, read_document(directory), advance)]
        if not faults:  # each of the files is as it was written: now what is in them
            read_native(directory)
        return faults
    except CheckpointError as error:
        return [str(error)]


def _files_in(places: list[Path]) -> list[Path]:
    return [file for place in places for file in (place.rglob("*") if place.is_dir() else [place]) if file.is_file()]


def _report(words: str, places: list[Path], faults: list[str]) -> Report:
    files = _files_in(places)
    num_bytes = sum(file.stat().st_size for file in files)
    return Report(format=words, num_files=len(files), size_bytes=num_bytes, faults=tuple(faults))
