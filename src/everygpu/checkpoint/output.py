"""Write a model's state in other programs' formats, beside the old file, which it replaces when complete."""

import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from everygpu.checkpoint.directory import list_siblings, new_directory, new_sibling, sync_path
from everygpu.checkpoint.foreign.formats import DCP_METADATA
from everygpu.checkpoint.lock import hold_lock
from everygpu.checkpoint.tensors import check_storable, identity
from everygpu.errors import CheckpointContentError, CheckpointForeignError

DCP_SECTION = "model"
"""The key that readers pass: ``torch.distributed.checkpoint.load({"model": model.state_dict()}, …)``."""


def write_torch(path: Path, state: Mapping[str, Any], versions: Mapping[str, Any]) -> None:
    """Write a state dict as ``torch.save(model.state_dict(), path)`` does; tied tensors stay tied.

    Args:
        path: The file.
        state: Names, tensors and modules' extra state.
        versions: Of the modules' classes, by their path.
    """
    document = OrderedDict(_compact(state))
    document._metadata = OrderedDict(versions)  # type: ignore[attr-defined]  # as Module.state_dict has it
    with new_file_at(path) as temporary, open(temporary, "wb") as file, _system_errors(RuntimeError):
        torch.save(document, file)


def write_safetensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file; each name gets its own copy, as readers expect.

    Raises:
        CheckpointContentError: a tensor is of a kind or dtype that the format has no word for.
    """
    tensors = {name: _owned(tensor) for name, tensor in _check(state).items()}
    with new_file_at(path) as temporary:
        mode = temporary.stat().st_mode
        try:
            with _system_errors(SafetensorError):
                save_file(tensors, temporary, metadata={"format": "pt"})
        except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as cause:
            dtypes = sorted({str(tensor.dtype) for tensor in tensors.values()})
            raise CheckpointContentError(
                f"convert: the tensors must be of kinds that safetensors has, got {', '.join(dtypes)} ({cause}). "
                f"Choose --dtype, or another format."
            ) from cause
        os.chmod(temporary, mode)  # the writer takes the group's rights away


def write_dcp(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write tensors as a directory of torch.distributed.checkpoint, under the key ``model``.

    Raises:
        CheckpointForeignError: the directory holds something else.
    """
    # These take half a second, and only this needs them.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    target = Path(os.path.realpath(path))
    if target.exists():
        others = [entry.name for entry in target.iterdir() if entry.suffix != ".distcp" and entry.name != DCP_METADATA]
        if others:
            raise CheckpointForeignError(
                f"convert: the directory must be free or a distributed checkpoint, as it is replaced as a whole, got "
                f"{path} with {min(others)!r} in it. Choose another one."
            )
    with new_directory(target) as directory, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        with _system_errors(CheckpointException):
            save({DCP_SECTION: dict(_check(state))}, checkpoint_id=directory, no_dist=True)


@contextmanager
def new_file_at(path: Path) -> Iterator[Path]:
    """Yield an empty file beside a path; it takes the path's place when the block ends, or is removed.

    What writers that were killed have left is removed first: the lock tells that they are dead.

    Args:
        path: The file to write; a symbolic link is followed, the permissions of what is there are kept.
    Raises:
        CheckpointBusyError: another process is writing to the path.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = new_sibling(target, "tmp")
    with hold_lock(target.with_name(f".{target.name}.lock")) as is_alone:
        for left in list_siblings(target, "tmp") if is_alone else ():
            if left.is_file() and not left.is_symlink():
                left.unlink()
        try:
            temporary.touch(exist_ok=False)
            if target.exists():
                os.chmod(temporary, target.stat().st_mode)
            yield temporary
            sync_path(temporary)
            os.replace(temporary, target)
            sync_path(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def _system_errors(*kinds: type[BaseException]) -> Iterator[None]:
    """Raise a writer's error as the system's own where that is behind it, for instance that the disk is full."""
    try:
        yield
    except kinds as error:
        cause = _find_system_error(error)
        if cause is None:
            raise
        raise cause from error


def _find_system_error(error: BaseException) -> OSError | None:
    """Look for the system's error in what an error came from, what it collects, and, of Rust's, what it says."""
    if isinstance(error, OSError):
        return error
    said = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
    if said is not None:
        return OSError(int(said[1]), os.strerror(int(said[1])))
    collected = [failure[0] for failure in getattr(error, "failures", {}).values()]  # of CheckpointException
    behind = [e for e in (error.__cause__, error.__context__, *collected) if e is not None]
    return next((found for found in map(_find_system_error, behind) if found is not None), None)


def _check(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    for name, tensor in state.items():
        check_storable(tensor, name)
    return state


def _owned(tensor: Tensor) -> Tensor:
    """Return the tensor as one that fills its memory alone."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.clone()


def _compact(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy tensors that are small parts of their memory: torch.save writes all of it."""
    copies: dict[object, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() == tensor.nbytes:
            return tensor
        return copies.setdefault(identity(tensor), tensor.clone())

    return {name: copy(value) if isinstance(value, Tensor) else value for name, value in state.items()}
