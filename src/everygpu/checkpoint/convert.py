"""Turn a checkpoint of one format into one of another."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from everygpu.checkpoint.contents import read_any
from everygpu.checkpoint.encode import encode
from everygpu.checkpoint.foreign import Contents
from everygpu.checkpoint.foreign.formats import locate
from everygpu.checkpoint.foreign.prefixes import rename
from everygpu.checkpoint.foreign.sections import is_state
from everygpu.checkpoint.load import load
from everygpu.checkpoint.output import write_dcp, write_safetensors, write_torch
from everygpu.checkpoint.rng import plan_rng_restore, rng_states_kept
from everygpu.checkpoint.save import save
from everygpu.checkpoint.states import Kind
from everygpu.checkpoint.tensors import memory_of
from everygpu.checkpoint.trainers import SavedState
from everygpu.checkpoint.writable import must_be_writable
from everygpu.errors import (
    CheckpointContentError,
    CheckpointDamagedError,
    CheckpointForeignError,
    OptionError,
)
from everygpu.tree import leaves

Target: TypeAlias = Literal["everygpu", "torch", "safetensors", "dcp"]

_SUFFIXES: dict[str, Target] = {
    ".pt": "torch",
    ".pth": "torch",
    ".ckpt": "torch",
    ".bin": "torch",
    ".safetensors": "safetensors",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The checkpoint that was written."""

    target: Target
    num_tensors: int
    left_out: tuple[str, ...]
    """Parts of the source that the result lacks, with the reason."""
    notes: tuple[str, ...]
    """Choices made in the source, and parts that could not be read."""


def convert(
    source: Path,
    destination: Path,
    *,
    target: Target | None = None,
    section: str | None = None,
    strip_prefix: str = "",
    add_prefix: str = "",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    writing: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> Outcome:
    """Write a checkpoint in another format; what is at the destination stays until that is complete.

    A directory of ours gets every part. The other formats get the model: a plain state dict.

    Args:
        source: A checkpoint of any format.
        destination: Where to write.
        target: The format; by default as the destination's name ends, a directory of ours otherwise.
        section: The name of the state dict to take for the model's.
        strip_prefix: Taken off the names that begin with it.
        add_prefix: Put before every name, after that.
        dtype: For floating-point tensors of the model.
        overwrite: Whether a checkpoint at the destination may be replaced.
        writing: Entered while the result is written, with the number of bytes that its tensors have.
    Raises:
        OptionError: no name begins with the prefix.
        CheckpointForeignError: something is at the destination and may not be replaced.
        CheckpointMismatchError: there is no model, or two names would become one.
        CheckpointContentError: the format can't hold a tensor.
        CheckpointError: as `everygpu.load` and `everygpu.save`.
    """
    target = target or _SUFFIXES.get(destination.suffix, "everygpu")
    _check_destination(destination, target, overwrite)
    contents = read_any(source, section=section)
    model = contents.require_model(source)
    new_name = _renamer(model, strip_prefix, add_prefix)
    model = _cast(rename(model, new_name), dtype)
    versions = {new_name(f"{path}.".lstrip(".")).rstrip("."): about for path, about in contents.versions.items()}
    with must_be_writable(destination, "convert"), writing(_count_bytes(contents, model, target)):
        left_out = _write(destination, target, contents, model, versions)
    num_tensors = sum(isinstance(value, Tensor) for value in model.values())
    return Outcome(target=target, num_tensors=num_tensors, left_out=tuple(left_out), notes=contents.notes)


def _check_destination(destination: Path, target: Target, overwrite: bool) -> None:
    if not destination.exists():
        return
    if destination.is_dir() != (target in ("everygpu", "dcp")):
        kind = "directory" if destination.is_dir() else "file"
        raise CheckpointForeignError(
            f"convert: the destination must be free, or hold a checkpoint of the format {target}, got the {kind} "
            f"{destination}. Choose another one."
        )
    is_empty = destination.is_dir() and not any(destination.iterdir())
    if not overwrite and not is_empty:
        raise CheckpointForeignError(
            f"convert: the destination must be free, got {destination}, which exists. Pass --overwrite to replace it."
        )
    if not destination.is_dir() and not _is_weights_file(destination):
        raise CheckpointForeignError(
            f"convert: the destination must be free or hold a checkpoint, got the file {destination}, which is none. "
            f"Choose another one, or remove it yourself."
        )


def _is_weights_file(path: Path) -> bool:
    """Tell a file of torch.save or safetensors, also one that was cut off, from what else may have been meant."""
    try:
        return locate(path).format in ("torch", "safetensors")
    except CheckpointDamagedError:  # empty
        return True
    except CheckpointForeignError:
        return False


def _renamer(model: Mapping[str, Any], strip: str, add: str) -> Callable[[str], str]:
    if strip and not any(name.startswith(strip) for name in model):
        starts = sorted({f"{name.split('.')[0]}." for name in model if "." in name})
        raise OptionError(
            f"convert: a name must begin with the prefix to strip, got {strip!r} where names begin with "
            f"{', '.join(map(repr, starts[:8])) or 'no prefix'}. Choose one of these."
        )
    return lambda name: add + name.removeprefix(strip)


def _cast(model: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Cast floating-point tensors, those that are tied to one that is tied."""
    casts: dict[object, Tensor] = {}

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        key = memory_of(value)
        if key not in casts:
            casts[key] = value.to(dtype)
        return casts[key]

    return model if dtype is None else {name: cast(value) for name, value in model.items()}


def _count_bytes(contents: Contents, model: Mapping[str, Any], target: Target) -> int:
    parts = [contents.optimizer, contents.scheduler, contents.extras] if target == "everygpu" else []
    found = (leaf for part in (model, *parts) for _, leaf in leaves(part, ""))
    return sum(leaf.nbytes for leaf in found if isinstance(leaf, Tensor) and leaf.layout == torch.strided)


def _write(
    destination: Path, target: Target, contents: Contents, model: Mapping[str, Any], versions: Mapping[str, Any]
) -> list[str]:
    """Write in the format and return what that leaves out."""
    if target == "everygpu":
        return _write_native(destination, contents, model, versions)
    parts = {"optimizer": contents.optimizer, "scheduler": contents.scheduler, **contents.extras}
    left_out = [f"{name!r}: a plain state dict has no place for it" for name, part in parts.items() if part is not None]
    if target == "torch":
        write_torch(destination, model, versions)
        return left_out
    left_out += [f"{name!r}: no tensor" for name, value in model.items() if not isinstance(value, Tensor)]
    write = write_safetensors if target == "safetensors" else write_dcp
    write(destination, {name: value for name, value in model.items() if isinstance(value, Tensor)})
    return left_out


class _State(nn.Module):
    """Stands for a module of which only the state is known."""

    def __init__(self, state: Mapping[str, Any], versions: Mapping[str, Any]) -> None:
        super().__init__()
        self._state, self._versions = state, versions

    def state_dict(self, *_: Any, **__: Any) -> Any:
        state = OrderedDict(self._state)
        state._metadata = OrderedDict(self._versions)  # type: ignore[attr-defined]
        return state


def _write_native(
    destination: Path, contents: Contents, model: Mapping[str, Any], versions: Mapping[str, Any]
) -> list[str]:
    extras, left_out = _storable(contents)
    parts = {"optimizer": contents.optimizer, "scheduler": contents.scheduler}
    stateful = {
        name: SavedState(state, contents.classes.get(name)) for name, state in parts.items() if state is not None
    }
    with rng_states_kept():
        if contents.rng is not None:  # save takes them from the process
            plan_rng_restore(contents.rng)()
        save(destination, model=_State(model, versions), **stateful, **extras)
    return left_out


def _storable(contents: Contents) -> tuple[dict[str, Any], list[str]]:
    """Sort out the extras that can be saved."""
    signatures = inspect.signature(save), inspect.signature(load)
    # Names with a star can be those of extras.
    reserved = {
        p.name for s in signatures for p in s.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    extras, left_out = {}, []
    for name, value in contents.extras.items():
        if name in reserved:
            left_out.append(f"{name!r}: the name has a meaning of its own in save or load")
            continue
        try:
            encode(value, name, {})
        except CheckpointContentError as error:
            left_out.append(f"{name!r}: {error}")
        else:
            extras[name] = _as_kind(value, contents.kinds.get(name), contents.classes.get(name))
    return extras, left_out


def _as_kind(value: Any, kind: Kind | None, class_name: str | None) -> Any:
    """Dress a value as what it was, so that it is saved in the same way."""
    if kind == "module" or (kind is None and is_state(value)):
        return _State(value, {})
    if kind == "generator":
        generator = torch.Generator()
        generator.set_state(value)
        return generator
    return SavedState(value, class_name) if kind == "state_dict" else value
