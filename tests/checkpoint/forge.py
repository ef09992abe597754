"""Checkpoints altered on purpose, with digests that agree: as a writer with a fault would make them."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any


def edit_document(directory: Path, **changes: Any) -> None:
    """Change entries of checkpoint.json, and make the sums agree."""
    path = directory / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    agree(directory)


def edit_part(directory: Path, name: str, **changes: Any) -> None:
    """Change entries of a part."""
    parts = json.loads((directory / "checkpoint.json").read_text())["parts"]
    edit_document(directory, parts=parts | {name: parts[name] | changes})


def agree(directory: Path) -> None:
    """Make sizes and sums agree with the files as they are."""
    path, names = directory / "checkpoint.json", [file.name for file in directory.glob("*.safetensors*")]
    try:
        document = json.loads(path.read_text())
        if isinstance(document, dict) and isinstance(document.get("files"), dict):
            found = {name: (directory / name).stat().st_size for name in names}
            if document["files"].keys() == found.keys() != set() and document["files"] != found:
                path.write_text(json.dumps(document | {"files": found}))
    except (ValueError, RecursionError):  # no JSON any more
        pass
    digests = {name: sha256((directory / name).read_bytes()).hexdigest() for name in [*names, path.name]}
    (directory / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
