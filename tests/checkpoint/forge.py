"""Checkpoints altered on purpose, with digests that agree: as a writer with a fault would make them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from everygpu.checkpoint.digests import hash_files
from everygpu.checkpoint.manifest import FileRecord, Manifest, make_manifest, seal


def describe_files(directory: Path, names: Iterable[str]) -> Manifest:
    """Make the manifest of files that are already written, by reading them."""
    sizes = {name: (directory / name).stat().st_size for name in names}
    digests = hash_files((directory / name, size_bytes) for name, size_bytes in sizes.items())
    return make_manifest(
        {name: FileRecord(size_bytes=sizes[name], sha256=found) for name, found in zip(sizes, digests)}
    )


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_manifest(directory: Path, **changes: Any) -> None:
    """Change entries of the manifest and seal it again."""
    path = directory / "manifest.json"
    document = json.loads(path.read_text()) | {"sha256": "0" * 64} | changes
    path.write_text(seal(json.dumps(document)))


def edit_state(directory: Path, **changes: Any) -> None:
    """Change entries of state.json and make the manifest agree."""
    edit_json(directory / "state.json", **changes)
    agree(directory)


def agree(directory: Path) -> None:
    """Make the manifest agree with the files as they are."""
    files = json.loads((directory / "manifest.json").read_text())["files"]
    records = describe_files(directory, files).files
    edit_manifest(
        directory, files={name: {"size_bytes": r.size_bytes, "sha256": r.sha256} for name, r in records.items()}
    )
