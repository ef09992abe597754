"""Recognise a file's format by its first bytes: names are unreliable, and several formats share ``.bin``."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal, TypeAlias

from everygpu.checkpoint.foreign.faults import broken, refused
from everygpu.checkpoint.manifest import MANIFEST_FILE, STATE_FILE
from everygpu.checkpoint.regular_file import open_regular
from everygpu.errors import CheckpointForeignError, CheckpointNotFoundError

Format: TypeAlias = Literal["torch", "safetensors", "index", "dcp"]
"""A file of torch.save, a safetensors file, a JSON index of shards, a directory of torch.distributed.checkpoint."""

DCP_METADATA = ".metadata"

_MODEL_FILES = tuple(
    f"{stem}{suffix}"
    for stem in ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
    for suffix in (".safetensors.index.json", ".safetensors", ".bin.index.json", ".bin")
)
"""What Transformers, Accelerate, Diffusers and PEFT call a model's file in a directory, best first."""

_MAX_NAME = 255
_HEAD_BYTES = 512
_OTHERS = {
    b"version https://git-lfs": ("a pointer of Git LFS", "Fetch the file itself: git lfs pull."),
    b"GGUF": ("a GGUF file", "Convert it with the tools it was made by."),
    b"\x89HDF": ("an HDF5 file, as Keras writes", "Convert it with the tools it was made by."),
    b"\x93NUMPY": ("a NumPy array", "Read it with numpy.load."),
    b"<": ("a web page or XML", "The download went wrong: fetch the file again."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The files to read, and their format."""

    format: Format
    path: Path
    """The file; the directory for ``dcp``."""


def is_native(path: Path) -> bool:
    """Tell whether a directory is one of ours, whole or not."""
    return (path / MANIFEST_FILE).exists() or (path / STATE_FILE).exists()


def locate(path: Path) -> Place:
    """Find what to read at a path.

    Args:
        path: A file, or a directory that holds a model's files.
    Returns:
        The file and its format.
    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointForeignError: it is of no format we read.
        CheckpointDamagedError: a file is empty or can't be opened.
    """
    if path.is_dir():
        return _locate_in(path)
    if path.is_file():
        return Place(format=_format_of(path), path=path)
    if path.exists():
        raise refused(path, "which is neither a file nor a directory", "Copy its content to a file first.")
    raise CheckpointNotFoundError(f"load: a checkpoint must exist, got {path} with nothing there. Check the path.")


def find_model_file(directory: Path) -> Path | None:
    """Find a model under one of the usual names; the directory itself for a distributed checkpoint."""
    if (directory / DCP_METADATA).is_file():
        return directory
    return next((directory / name for name in _MODEL_FILES if (directory / name).is_file()), None)


def is_plain_name(name: str) -> bool:
    """Tell whether a name that a checkpoint gives is that of a file in its directory, on any system."""
    # What can't be printed, as half of a surrogate pair, can't be told in an error either.
    is_usable = name not in ("", ".", "..") and name.isprintable() and len(name.encode()) <= _MAX_NAME
    return is_usable and all(kind(name).name == name for kind in (PurePosixPath, PureWindowsPath))


def _locate_in(directory: Path) -> Place:
    found = find_model_file(directory)
    if found is None:
        raise CheckpointForeignError(
            f"load: the directory must hold a checkpoint, got {directory} with none of {MANIFEST_FILE}, "
            f"{DCP_METADATA}, {', '.join(_MODEL_FILES[:4])}. Pass one of its files or directories{_listing(directory)}."
        )
    return Place(format="dcp", path=found) if found == directory else locate(found)


def _listing(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir())
    shown = ", ".join(names[:8])
    return f": {shown}{', …' if len(names) > 8 else ''}" if names else ""


def _format_of(path: Path) -> Format:
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
    except OSError as cause:
        raise broken(path, f"can't be opened ({cause.strerror})") from cause
    if not head:
        raise broken(path, "is empty")
    # Eight letters of text, taken as a length, are far above any header's. This comes before pickles: headers of
    # 128 and 384 bytes, and some longer ones, have lengths that begin as those do.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40:
        return "safetensors"
    if head.startswith(b"PK\x03\x04") or (head[0] == 0x80 and head[1:2] <= b"\x05"):
        return "torch"
    if head.lstrip().startswith(b"{"):
        return "index"
    for magic, (what, advice) in _OTHERS.items():
        if head.lstrip().startswith(magic):
            raise refused(path, what, advice)
    raise refused(
        path,
        "whose first bytes are of no format that is known here",
        "Pass a file of torch.save, a safetensors file, or a directory with such files.",
    )
