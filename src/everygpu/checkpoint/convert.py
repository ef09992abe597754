"""Write a checkpoint's model as a file that other programs read."""

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everygpu.checkpoint.directory import must_be_writable, replacing
from everygpu.checkpoint.format import write_safetensors
from everygpu.checkpoint.load import read_any
from everygpu.checkpoint.states import rename
from everygpu.checkpoint.values import check_storable, identity
from everygpu.errors import OptionError

SUFFIXES = {**dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "torch.save"), ".safetensors": "safetensors"}
"""File suffixes, and the format that other programs expect for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The file that was written."""

    format: str
    num_tensors: int
    left_out: tuple[str, ...]
    """Parts of the source that the result lacks."""
    notes: tuple[str, ...]
    """Choices made in the source, and parts that could not be read."""


def convert(
    source: Path, destination: Path, *, section: str | None = None, strip_prefix: str = "", overwrite: bool = False
) -> Outcome:
    """Write a checkpoint's model as a state dict; what is at the destination stays until that is complete."""
    target = SUFFIXES.get(destination.suffix)
    if target is None:
        what = f"{destination.name} has the suffix {destination.suffix or '(none)'}, which belongs to no known format"
        raise OptionError(f"convert: {what}. Choose one of {', '.join(SUFFIXES)}.")
    if destination.exists() and (not overwrite or destination.is_dir()):
        todo = "Choose a file" if overwrite else "Pass --overwrite to replace it"
        raise OptionError(f"convert: {destination} exists. {todo}.")
    contents = read_any(source, section=section)
    saved = contents.require_model(source)
    if strip_prefix and not any(name.startswith(strip_prefix) for name in saved):
        starts = sorted({f"{name.split('.')[0]}." for name in saved if "." in name})
        known = ", ".join(map(repr, starts[:8])) or "none"
        raise OptionError(f"convert: No name begins with the prefix {strip_prefix!r}. They begin with {known}.")
    model = rename(saved, lambda name: name.removeprefix(strip_prefix))
    versions = contents.parts["model"].state["versions"]
    versions = {f"{path}.".removeprefix(strip_prefix).rstrip(".") if path else "": v for path, v in versions.items()}
    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    left_out = {*contents.parts, *contents.extras} - {"model"}
    target_path = Path(os.path.realpath(destination))
    with must_be_writable(destination, "convert"), replacing(target_path, is_file=True) as temporary:
        if target == "safetensors":
            left_out |= model.keys() - tensors.keys()
            for name, tensor in tensors.items():
                check_storable(tensor, name)
            write_safetensors(temporary, tensors)
        else:
            _write_torch(temporary, model, versions)
    return Outcome(
        format=target, num_tensors=len(tensors), left_out=tuple(sorted(map(repr, left_out))), notes=contents.notes
    )


def _write_torch(path: Path, state: Mapping[str, Any], versions: Mapping[str, Any]) -> None:
    """Write a state dict as ``torch.save(model.state_dict(), path)`` does; tied tensors stay tied."""
    # Of a tensor that is a small part of its memory, torch.save writes all of it.
    alone: dict[object, Tensor] = {}
    document: OrderedDict[str, Any] = OrderedDict(state)
    for name, value in state.items():
        if isinstance(value, Tensor) and value.layout == torch.strided:
            is_all = value.untyped_storage().nbytes() == value.nbytes
            document[name] = alone.setdefault(identity(value), value if is_all else value.clone())
    document._metadata = OrderedDict(versions)  # type: ignore[attr-defined]  # as Module.state_dict has it
    with open(path, "wb") as file:
        try:
            torch.save(document, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # the disk is full
                raise error.__context__ from error
            raise
