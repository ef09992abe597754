"""The manifest: what a checkpoint consists of. It is written last; without it a checkpoint is incomplete."""

import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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

_LIBRARIES = ("everygpu", "torch", "safetensors", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What the manifest knows of one file."""

    size_bytes: int
    sha256: str | None = None
    """Lower-case hex digest; None where none was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Format version, files and library versions of one checkpoint."""

    version: int
    files: dict[str, FileRecord]
    libraries: dict[str, str]


def describe_files(directory: Path, names: Iterable[str]) -> Manifest:
    """Make the manifest of files that are already written.

    Args:
        directory: Where the files are.
        names: Their names, without the manifest's own.
    Returns:
        Sizes as the file system reports them, and the versions of the libraries at hand.
    """
    files = {name: FileRecord(size_bytes=(directory / name).stat().st_size) for name in names}
    return Manifest(version=FORMAT_VERSION, files=files, libraries=_library_versions())


def manifest_to_json(manifest: Manifest) -> str:
    """Write the manifest as JSON that people can read too."""
    files = {
        name: {"size_bytes": record.size_bytes, "sha256": record.sha256}
        for name, record in sorted(manifest.files.items())
    }
    document = {
        "format": FORMAT_NAME,
        "version": manifest.version,
        "files": files,
        "libraries": manifest.libraries,
    }
    return json.dumps(document, indent=2) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint directory and check it against the files beside it.

    Args:
        directory: An existing directory.
    Returns:
        The manifest; every file in it exists and has the size it says.
    Raises:
        CheckpointForeignError: the directory is no checkpoint, or one of a newer format.
        CheckpointDamagedError: the manifest is missing, unreadable, or disagrees with the files.
    """
    manifest = _parse(directory / MANIFEST_FILE, read_json(_require_manifest(directory)))
    for name, record in manifest.files.items():
        _check_size(directory / name, record)
    return manifest


def read_json(path: Path) -> Any:
    """Read one JSON file of a checkpoint.

    Raises:
        CheckpointDamagedError: the file is missing or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise damaged(path, f"is no readable JSON ({cause})") from cause


def damaged(path: Path, what: str) -> CheckpointDamagedError:
    """Say which file is damaged, how, and what can still be done."""
    return CheckpointDamagedError(
        f"load: every file of a checkpoint must be as it was written, got {path} that {what}. "
        f"Nothing was loaded; take an earlier checkpoint."
    )


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


def _parse(path: Path, document: Any) -> Manifest:
    """Turn the manifest's JSON into a record, trusting nothing in it."""
    if not isinstance(document, dict):
        raise damaged(path, "holds no JSON object")
    if document.get("format") != FORMAT_NAME:
        raise CheckpointForeignError(
            f"load: {path} must name the format {FORMAT_NAME!r}, got {document.get('format')!r}. "
            f"Pass a checkpoint that everygpu.save wrote."
        )
    number = document.get("version")
    if type(number) is not int or number < 1:
        raise damaged(path, f"has the format version {number!r}")
    if number > FORMAT_VERSION:
        raise CheckpointForeignError(
            f"load: the checkpoint's format version must be at most {FORMAT_VERSION}, got {number} "
            f"in {path}. Upgrade everygpu to read it."
        )
    files = document.get("files")
    if not isinstance(files, dict) or STATE_FILE not in files:
        raise damaged(path, f"does not list {STATE_FILE}")
    return Manifest(
        version=number,
        files={name: _parse_record(path, name, record) for name, record in files.items()},
        libraries=document["libraries"] if isinstance(document.get("libraries"), dict) else {},
    )


def _parse_record(path: Path, name: str, record: Any) -> FileRecord:
    if name not in FILE_NAMES - {MANIFEST_FILE}:
        raise damaged(path, f"lists an unknown file {name!r}")
    size = record.get("size_bytes") if isinstance(record, dict) else None
    digest = record.get("sha256") if isinstance(record, dict) else None
    if type(size) is not int or not isinstance(digest, str | None):
        raise damaged(path, f"does not give the size of {name}")
    return FileRecord(size_bytes=size, sha256=digest)


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        size = path.stat().st_size
    except OSError as cause:
        raise damaged(path, f"can't be found ({cause.strerror})") from cause
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
