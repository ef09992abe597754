"""The manifest: the list of a checkpoint's files. It is written last; without it a checkpoint is incomplete.

It holds the digests of all other files and one of itself, so that no altered byte goes unnoticed.
"""

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from everygpu.checkpoint.brief import brief, cut
from everygpu.checkpoint.digests import CHUNK_BYTES, hash_files
from everygpu.checkpoint.regular_file import read_document, require_regular
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError

FORMAT_NAME = "everygpu.checkpoint"
FORMAT_VERSION = 1
"""Raised when an older everygpu could not read what this one writes."""

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
MODEL_TENSORS = "model.safetensors"
OPTIMIZER_TENSORS = "optimizer.safetensors"
STATE_TENSORS = "state.safetensors"
FILE_NAMES = frozenset({MANIFEST_FILE, STATE_FILE, MODEL_TENSORS, OPTIMIZER_TENSORS, STATE_TENSORS})
"""Every name a checkpoint directory may hold."""

_UNSEALED = "0" * 64
"""Stands for the manifest's digest while that is taken."""

_LIBRARIES = ("everygpu", "torch", "safetensors", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The manifest's entry for one file."""

    size_bytes: int
    sha256: tuple[str, ...]
    """Lower-case hex digests of its chunks of ``CHUNK_BYTES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a checkpoint stands among those of its run."""

    step: int
    serial: int
    """Counts the run's saves: the highest was written last, also after the run went back to an earlier step."""
    metrics: dict[str, float] = field(default_factory=dict)
    num_nonfinite: int = 0
    """How many tensors of the model have values that are nan or infinite; 0 where that isn't known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Format version, files and library versions of one checkpoint."""

    version: int
    files: dict[str, FileRecord]
    libraries: dict[str, str]
    place: Place | None = None
    """None for a checkpoint that no CheckpointManager wrote."""


def make_manifest(files: Mapping[str, FileRecord], place: Place | None = None) -> Manifest:
    """Make a manifest of this format's version, with the versions of the libraries at hand."""
    return Manifest(version=FORMAT_VERSION, files=dict(files), libraries=_library_versions(), place=place)


def manifest_to_json(manifest: Manifest) -> str:
    """Write the manifest as JSON that people can read too, with its own digest at the end."""
    document: dict[str, Any] = {
        "format": FORMAT_NAME,
        "version": manifest.version,
        "chunk_bytes": CHUNK_BYTES,
        "files": {
            name: {"size_bytes": record.size_bytes, "sha256": record.sha256}
            for name, record in sorted(manifest.files.items())
        },
        "libraries": manifest.libraries,
    }
    if manifest.place is not None:
        place = manifest.place
        document["place"] = {"step": place.step, "serial": place.serial, "metrics": place.metrics}
        if place.num_nonfinite:
            document["place"]["num_nonfinite"] = place.num_nonfinite
    return seal(json.dumps(document | {"sha256": _UNSEALED}, indent=2, allow_nan=False) + "\n")


def seal(text: str) -> str:
    """Put the digest of a manifest's text in the place that is left for it, as `_UNSEALED`."""
    return text.replace(_UNSEALED, sha256(text.encode()).hexdigest())


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint directory, check it, and check the sizes of the files beside it.

    Args:
        directory: An existing directory.
    Returns:
        The manifest; every file in it exists and has the size it says. `check_files` checks the rest.
    Raises:
        CheckpointForeignError: the directory is no checkpoint, or one of a newer format.
        CheckpointDamagedError: the manifest is missing, altered, or disagrees with the files.
    """
    manifest = read_sealed_manifest(directory)
    for name, record in manifest.files.items():
        _check_size(directory / name, record)
    return manifest


def read_sealed_manifest(directory: Path) -> Manifest:
    """Read the manifest and check it by itself, without looking at the files it lists.

    Raises:
        CheckpointForeignError: the directory is no checkpoint, or one of a newer format.
        CheckpointDamagedError: the manifest is missing or altered.
    """
    path = _require_manifest(directory)
    return _parse(path, _read_sealed(path))


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compare every byte of a checkpoint's files with the digests in its manifest.

    Args:
        directory: Where the files are.
        manifest: As `read_manifest` returned it.
    Raises:
        CheckpointDamagedError: a file differs; its name and place are told.
    """
    paths = [(directory / name, record.size_bytes) for name, record in manifest.files.items()]
    try:
        found = hash_files(paths)
    except OSError as cause:
        raise damaged(Path(cause.filename or directory), f"can't be read ({cause.strerror})") from cause
    for (path, _), record, digests in zip(paths, manifest.files.values(), found):
        differing = [index for index, pair in enumerate(zip(record.sha256, digests)) if pair[0] != pair[1]]
        if differing:
            begin = differing[0] * CHUNK_BYTES
            end = min(begin + CHUNK_BYTES, record.size_bytes)
            raise damaged(path, f"was altered between its bytes {begin} and {end}")


def read_json(path: Path) -> Any:
    """Read one JSON file of a checkpoint.

    Raises:
        CheckpointDamagedError: the file is missing or is no JSON.
    """
    return _parse_json(path, _read_bytes(path))


def damaged(path: Path, what: str) -> CheckpointDamagedError:
    """Say which file is damaged, how, and what can still be done."""
    return CheckpointDamagedError(
        f"load: every file of a checkpoint must be as it was written, got {path} that {cut(what)}. "
        f"Nothing was loaded; take an earlier checkpoint."
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return read_document(path)
    except OSError as cause:
        raise damaged(path, f"can't be read ({cause.strerror})") from cause


def _parse_json(path: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise damaged(path, f"is no readable JSON ({cause})") from cause


def _require_manifest(directory: Path) -> Path:
    path = directory / MANIFEST_FILE
    if path.exists():
        return path
    if (directory / STATE_FILE).exists():
        raise damaged(path, "is missing")
    raise CheckpointForeignError(
        f"load: the directory must be one that everygpu.save wrote, got {directory} with neither "
        f"{MANIFEST_FILE} nor {STATE_FILE}. Pass the checkpoint directory itself."
    )


def _read_sealed(path: Path) -> Any:
    """Read the manifest's JSON; where it is one of ours, its digest must be right."""
    text = _read_bytes(path)
    document = _parse_json(path, text)
    if isinstance(document, dict) and document.get("format") == FORMAT_NAME:
        digest = document.get("sha256")
        if not isinstance(digest, str) or len(digest) != len(_UNSEALED) or not digest.isascii():
            raise damaged(path, "does not give its own SHA-256")
        if sha256(text.replace(digest.encode(), _UNSEALED.encode())).hexdigest() != digest:
            raise damaged(path, "was altered: its SHA-256 is not the one it gives")
    return document


def _parse(path: Path, document: Any) -> Manifest:
    """Turn the manifest's JSON into a record, trusting nothing in it."""
    if not isinstance(document, dict):
        raise damaged(path, "holds no JSON object")
    if document.get("format") != FORMAT_NAME:
        raise CheckpointForeignError(
            f"load: {path} must name the format {FORMAT_NAME!r}, got {brief(document.get('format'))}. "
            f"Pass a checkpoint that everygpu.save wrote."
        )
    number = document.get("version")
    if type(number) is not int or number < 1:
        raise damaged(path, f"has the format version {brief(number)}")
    if number > FORMAT_VERSION:
        raise CheckpointForeignError(
            f"load: the checkpoint's format version must be at most {FORMAT_VERSION}, got {brief(number)} "
            f"in {path}. Upgrade everygpu to read it."
        )
    if document.get("chunk_bytes") != CHUNK_BYTES:
        raise damaged(path, f"has chunks of {brief(document.get('chunk_bytes'))} bytes instead of {CHUNK_BYTES}")
    files = document.get("files")
    if not isinstance(files, dict) or STATE_FILE not in files:
        raise damaged(path, f"does not list {STATE_FILE}")
    return Manifest(
        version=number,
        files={name: _parse_record(path, name, record) for name, record in files.items()},
        libraries=document["libraries"] if isinstance(document.get("libraries"), dict) else {},
        place=_parse_place(path, document["place"]) if "place" in document else None,
    )


def _parse_record(path: Path, name: str, record: Any) -> FileRecord:
    if name not in FILE_NAMES - {MANIFEST_FILE}:
        raise damaged(path, f"lists an unknown file {brief(name)}")
    size = record.get("size_bytes") if isinstance(record, dict) else None
    digests = record.get("sha256") if isinstance(record, dict) else None
    if type(size) is not int or size < 0:
        raise damaged(path, f"does not give the size of {name}")
    num_chunks = -(-size // CHUNK_BYTES)
    if not isinstance(digests, list) or len(digests) != num_chunks or not all(type(d) is str for d in digests):
        raise damaged(path, f"does not give the SHA-256 of each chunk of {name}")
    return FileRecord(size_bytes=size, sha256=tuple(digests))


def _parse_place(path: Path, place: Any) -> Place:
    try:
        step, serial, metrics = place["step"], place["serial"], dict(place["metrics"])
        num_nonfinite = place.get("num_nonfinite", 0)
    except (LookupError, TypeError, ValueError, AttributeError) as cause:
        raise damaged(path, f"has no readable step, serial and metrics ({type(cause).__name__})") from cause
    if any(type(n) is not int for n in (step, serial, num_nonfinite)) or not _are_metrics(metrics):
        raise damaged(path, "has a step, serial or metric that is no finite number")
    return Place(step=step, serial=serial, metrics=metrics, num_nonfinite=num_nonfinite)


def _are_metrics(metrics: dict[Any, Any]) -> bool:
    return all(type(name) is str and type(m) is float and math.isfinite(m) for name, m in metrics.items())


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        size = require_regular(path).st_size
    except OSError as cause:
        raise damaged(path, f"can't be read ({cause.strerror})") from cause
    if size != record.size_bytes:
        raise damaged(path, f"has {size} bytes where {record.size_bytes} were written")


def _library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
