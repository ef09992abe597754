"""Read any checkpoint, ours or not, to look at it, compare or convert it."""

from pathlib import Path
from typing import Any

from everygpu.checkpoint import manifest as files
from everygpu.checkpoint.directory import find_directory
from everygpu.checkpoint.encode import decode
from everygpu.checkpoint.foreign import Contents, read_foreign
from everygpu.checkpoint.foreign.formats import is_native
from everygpu.checkpoint.foreign.sections import is_state
from everygpu.checkpoint.read import ReadTensors, decoding
from everygpu.checkpoint.run_directory import is_run_directory, list_saved
from everygpu.errors import CheckpointMismatchError

NATIVE_FORMAT = "everygpu"


def read_any(path: Path, *, section: str | None = None, with_values: bool = True) -> Contents:
    """Read a checkpoint of any format.

    Args:
        path: A directory of `everygpu.save`; of a `CheckpointManager`, whose newest checkpoint is read; or what
            `read_foreign` takes.
        section: The name of the state dict to take for the model's, where it is not the usual one.
        with_values: False allows tensors on the meta device.
    Returns:
        Its parts; tensors on the CPU, perhaps backed by the file.
    Raises:
        CheckpointError: as `everygpu.load` does.
    """
    saved = list_saved(path) if is_run_directory(path) else []
    path = saved[0].path if saved else path
    if not path.exists() or is_native(path):
        contents = read_native(find_directory(path))
        return contents if section is None else _take_section(contents, section)
    return read_foreign(path, section=section, with_values=with_values)


def read_native(directory: Path) -> Contents:
    """Read every part of a checkpoint of ours.

    Args:
        directory: As `find_directory` returns it.
    Raises:
        CheckpointForeignError: it is no checkpoint of ours, or one of a newer format.
        CheckpointDamagedError: a file is missing, cut off or altered.
    """
    manifest = files.read_manifest(directory)

    with decoding(directory, manifest) as (state, read):
        return _decode(state, manifest, read)


def _decode(state: Any, manifest: files.Manifest, read: ReadTensors) -> Contents:
    rest = read(files.STATE_TENSORS)
    model = decode(state["model"]["state"], read(files.MODEL_TENSORS)) if "model" in state else None
    optimizer = decode(state["optimizer"]["state"], read(files.OPTIMIZER_TENSORS)) if "optimizer" in state else None
    scheduler = decode(state["scheduler"]["state"], rest) if "scheduler" in state else None
    kinds = {name: part["kind"] for name, part in state["extras"].items()}
    parts = {name: state[name] for name in ("optimizer", "scheduler") if name in state} | state["extras"]
    classes = {name: part["class"] for name, part in parts.items() if isinstance(part.get("class"), str)}
    extras = {name: decode(part["state"], rest) for name, part in state["extras"].items()}
    return Contents(
        format=NATIVE_FORMAT,
        model=None if model is None else dict(model["values"]),
        why_no_model="no model in it. Save one with everygpu.save(path, model=model).",
        versions={} if model is None else dict(model["versions"]),
        optimizer=optimizer,
        scheduler=scheduler,
        extras={name: value["values"] if kinds[name] == "module" else value for name, value in extras.items()},
        kinds=kinds,
        classes=classes,
        rng=decode(state["rng"], {}),
        libraries={str(name): str(version) for name, version in manifest.libraries.items()},
    )


def _take_section(contents: Contents, section: str) -> Contents:
    """Take a module that was saved under another name for the model."""
    state = contents.extras.get(section)
    if not is_state(state):
        known = [name for name, value in contents.extras.items() if is_state(value)]
        raise CheckpointMismatchError(
            f"load: the section must be a module that was saved under that name, got {section!r} where there are "
            f"{', '.join(map(repr, known)) or 'none'}. Choose one of these."
        )
    return Contents(format=contents.format, model=state, section=section, libraries=contents.libraries)
