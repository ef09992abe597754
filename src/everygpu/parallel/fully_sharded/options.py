"""What ``DataParallel(shard=...)`` is told, and what refuses a model or a run that it can't be done with."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from everygpu.errors import ModuleError, OptimizerError, OptionError, RankError
from everygpu.keys import is_compiled
from everygpu.parallel.fully_sharded.groups import Groups
from everygpu.ranks.group import Group, join_alone

LEVELS = ("parameters", "gradients", "optimizer")
PRECISIONS = {None: None, "fp32": None, "bf16": torch.bfloat16}
_ENGINES = ("auto", "threads", "compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a model is shared out."""

    level: str
    """One of ``LEVELS``."""
    wrap: Sequence[type[nn.Module]] | None = None
    """The classes of its blocks; found where they are left out."""
    precision: str | None = None
    """In which forward and backward compute."""
    checkpoints: bool = False
    """Whether blocks compute their activations again in backward."""
    compiles: bool = False
    """Whether blocks are compiled."""


def read_options(shard: Any, *, wrap: Any, precision: Any, checkpoint_activations: Any, engine: str) -> Sharding | None:
    """Check the options of a ``DataParallel``; None where the model isn't to be shared out.

    Raises:
        OptionError: an option has no such value, or needs another.
    """
    alone = {"wrap": wrap, "precision": precision, "checkpoint_activations": checkpoint_activations}
    if shard is None:
        given = next((name for name, value in alone.items() if value is not None), None)
        if given is not None:
            raise OptionError(f"DataParallel: {given} needs shard=, one of {LEVELS}. TrainStep has precision=, too.")
        return None
    kinds = [wrap] if isinstance(wrap, type) else wrap
    is_classes = kinds is None or all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)
    recomputed = (None, "blocks")
    checks = (
        ("shard", shard, LEVELS, shard in LEVELS),
        ("wrap", wrap, "a list of module classes", is_classes),
        ("precision", precision, tuple(PRECISIONS), precision in PRECISIONS),
        ("checkpoint_activations", checkpoint_activations, recomputed, checkpoint_activations in recomputed),
        ("engine", engine, f"one of {_ENGINES} beside shard=", engine in _ENGINES),
    )
    for name, value, wanted, is_right in checks:
        if not is_right:
            raise OptionError(f"DataParallel: {name} must be {wanted}, got {value!r}.")
    return Sharding(
        level=shard,
        wrap=kinds,
        precision=precision,
        checkpoints=checkpoint_activations is not None,
        compiles=engine == "compile",
    )


def check_ranks(group: Group | None, sharding: Sharding, devices: Sequence[torch.device]) -> Group:
    """Refuse a process that has nobody to share the model with.

    Raises:
        RankError: there are no ranks.
        OptionError: this rank has several devices.
    """
    group = join_alone() if group is None else group
    if group is None:
        raise RankError(
            f"DataParallel: shard={sharding.level!r} shares the model out over processes, one a GPU, and this one is "
            f"alone. Start the script by: everygpu run --processes auto train.py"
        )
    if len(devices) > 1:
        raise OptionError(
            f"DataParallel: shard={sharding.level!r} needs one device in each process, got "
            f"{', '.join(map(str, devices))}. Leave device_ids out, and start one process a GPU."
        )
    return group


def check_tensors(module: nn.Module) -> None:
    """Refuse a model that FSDP2 can't share out, or would spoil without a word.

    Raises:
        ModuleError: the message names the parameter, buffer or module.
    """
    if is_compiled(module):
        _refuse("the model is compiled as a whole", "Pass the bare model, and engine='compile', which compiles blocks")
    for path, child in module.named_modules():
        stem = f"{path}." if path else ""
        for name, p in child.named_parameters(recurse=False):
            if is_lazy(p):
                _refuse(f"{stem}{name} is lazy and has no shape", "Run one batch through the model first")
            if p.ndim == 0:
                _refuse(
                    f"parameter {stem}{name} is of shape (), which has no rows to share out", "Make it of shape (1,)"
                )
            if p.is_sparse or getattr(child, "sparse", False):
                _refuse(f"{stem}{name} has sparse gradients", "Pass sparse=False")
        persistent = {key.rpartition(".")[2] for key in child.state_dict(keep_vars=True)} if _has_meta(child) else set()
        for name, buffer in child.named_buffers(recurse=False):
            if buffer.is_meta and name not in persistent:
                _refuse(
                    f"buffer {stem}{name} is on the meta device and in no checkpoint, so nothing could fill it",
                    f"Make {path or 'the model'} again outside of torch.device('meta'), and put it in its place",
                )


def check_groups(module: nn.Module, groups: Groups) -> None:
    """Refuse parameters of several dtypes that train in one group.

    Raises:
        ModuleError: the message names two of them.
    """
    group_of = {id(m): i for i, part in enumerate(groups) for m in part.modules()}
    first: dict[int, tuple[str, torch.dtype]] = {}
    for path, child in module.named_modules():
        for name, p in child.named_parameters(recurse=False):
            here = f"{path}.{name}".lstrip(".")
            if p.requires_grad:
                there, dtype = first.setdefault(group_of.get(id(child), -1), (here, p.dtype))
                if dtype != p.dtype:
                    _refuse(
                        f"{there} is of {dtype} and {here} of {p.dtype}, and both train in one group",
                        "Make them of one dtype, as by model.float(), and pass precision='bf16' to compute in it",
                    )


class _Kept(NamedTuple):
    name: str
    parameter: "weakref.ref[Tensor]"


class OldParameters:
    """The parameters that a model had before it was shared out, in whose places others are now.

    An optimizer made of them trains nothing, and raises nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._kept = [_Kept(name, weakref.ref(p)) for name, p in module.named_parameters()]

    def check(self) -> None:
        """Raise an OptimizerError where an optimizer still has one."""
        alive = {id(p): kept.name for kept in self._kept if (p := kept.parameter()) is not None}
        for optimizer in _optimizers() if alive else ():
            for group in optimizer.param_groups:
                name = next((alive[id(p)] for p in group["params"] if id(p) in alive), None)
                if name is not None:
                    raise OptimizerError(
                        f"DataParallel: {type(optimizer).__name__} was made before the model was wrapped, and would "
                        f"train nothing: {name} and the others have new parameters now. Make the optimizer from "
                        f"model.parameters() after DataParallel(model, shard=...)."
                    )


def _optimizers() -> Iterator[Any]:
    # By type: isinstance asks objects for ``__class__``, and some load modules then.
    return (found for found in gc.get_objects() if issubclass(type(found), Optimizer))


def _has_meta(module: nn.Module) -> bool:
    return any(buffer.is_meta for buffer in module.buffers(recurse=False))


def _refuse(what: str, todo: str) -> NoReturn:
    raise ModuleError(f"DataParallel: shard= can't share this model out: {what}. {todo}.")
