"""Write a checkpoint."""

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from everygpu.checkpoint import manifest as files
from everygpu.checkpoint.directory import new_directory, new_file, resolve_target
from everygpu.checkpoint.encode import Json, encode
from everygpu.checkpoint.rng import take_rng_states
from everygpu.checkpoint.states import kind_of, require_kind, take_state
from everygpu.checkpoint.tensors import write_tensors
from everygpu.errors import CheckpointContentError, CheckpointError

LOAD_OPTIONS = frozenset({"strict", "rng", "map_location"})
"""Names that `everygpu.load` takes for itself."""


def save(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    **extras: Any,
) -> Path:
    """Save a training run to a directory, so that either the old checkpoint or the new one is there.

    The directory holds ``model.safetensors``, ``optimizer.safetensors``, ``state.json`` (structure,
    scheduler, extras, random states), ``state.safetensors`` where those have tensors, and
    ``manifest.json``. It is written to ``.NAME.tmp-*`` beside the path, synced and renamed. The checkpoint
    that was there is renamed to ``.NAME.old-*`` for that moment and removed at the end; if the process
    dies in between, `everygpu.load` finds it there.

    Args:
        path: The directory, new or an earlier checkpoint; symbolic links to it are followed.
        model: A module, bare or wrapped. Names are stored without the prefixes of wrappers, tied
            tensors once.
        optimizer: Any object with state_dict and load_state_dict.
        scheduler: Likewise.
        **extras: Under any other name: values JSON can hold, tensors, NumPy arrays, in list, tuple and
            dict at any depth; or an object with state_dict and load_state_dict, or a torch.Generator.
    Returns:
        The path.
    Raises:
        CheckpointContentError: a value has no place in a checkpoint; nothing was written.
        CheckpointForeignError: something else than a checkpoint is at the path; it is left alone.
        CheckpointError: writing failed; the old checkpoint is untouched.
    """
    taken = LOAD_OPTIONS & extras.keys()
    if taken:
        raise CheckpointContentError(
            f"save: names of extras must not be those of load's options, got {min(taken)!r}. Choose another name."
        )
    if model is not None:
        require_kind(model, "model", "a torch.nn.Module", "save", "module")
    for name, value in {"optimizer": optimizer, "scheduler": scheduler}.items():
        if value is not None:
            require_kind(value, name, "an object with state_dict and load_state_dict", "save", "state_dict")
    given = Path(path)
    state, tensors = _take(model, {"optimizer": optimizer, "scheduler": scheduler}, extras)
    try:
        target = resolve_target(given)
        with new_directory(target) as directory:
            _write(directory, state, tensors)
    except OSError as cause:
        raise CheckpointError(
            f"save: {given} must be writable, got {cause}. What was there before is untouched; make room or "
            f"choose another place."
        ) from cause
    return given


def _take(
    model: object, trained_by: dict[str, object], extras: dict[str, object]
) -> tuple[Json, dict[str, dict[str, Tensor]]]:
    """Collect the state of everything: the content of state.json, and the tensors of each file."""
    model_tensors: dict[str, Tensor] = {}
    optimizer_tensors: dict[str, Tensor] = {}
    state_tensors: dict[str, Tensor] = {}
    state: dict[str, Json] = {"extras": {}, "rng": encode(take_rng_states(), "rng", state_tensors)}
    tensors = {}
    if model is not None:
        state["model"] = _encode_part(model, "", model_tensors)
        tensors[files.MODEL_TENSORS] = model_tensors
    if trained_by["optimizer"] is not None:
        state["optimizer"] = _encode_part(trained_by["optimizer"], "", optimizer_tensors)
        tensors[files.OPTIMIZER_TENSORS] = optimizer_tensors
    if trained_by["scheduler"] is not None:
        state["scheduler"] = _encode_part(trained_by["scheduler"], "scheduler", state_tensors)
    for name, value in extras.items():
        state["extras"][name] = _encode_part(value, f"extras.{name}", state_tensors)
    if state_tensors:
        tensors[files.STATE_TENSORS] = state_tensors
    return state, tensors


def _encode_part(value: object, path: str, tensors: dict[str, Tensor]) -> Json:
    kind, state = kind_of(value), take_state(value)
    if kind != "module":
        return {"kind": kind, "state": encode(state, path, tensors)}
    # A module's tensors are stored under the very names it has for them.
    values = encode(state["values"], path, tensors)
    return {"kind": kind, "state": {"values": values, "versions": encode(state["versions"], path, tensors)}}


def _write(directory: Path, state: Json, tensors: dict[str, dict[str, Tensor]]) -> None:
    for name, content in tensors.items():
        with new_file(directory / name) as file:
            write_tensors(file, content)
    _write_text(directory / files.STATE_FILE, json.dumps(state, allow_nan=False) + "\n")
    manifest = files.describe_files(directory, [*tensors, files.STATE_FILE])
    _write_text(directory / files.MANIFEST_FILE, files.manifest_to_json(manifest))


def _write_text(path: Path, text: str) -> None:
    with new_file(path) as file:
        file.write(text.encode())
