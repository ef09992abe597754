"""Checked options of sharding, and which modules of a model are sharded together."""

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everygpu.errors import ModuleError, OptimizerError, OptionError, RankError
from everygpu.keys import is_compiled
from everygpu.parallel.fully_sharded.shards import is_shard
from everygpu.ranks.group import Group, init_single

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that nobody calls: their forward can't gather the parameters."""
_LEAST = 16
"""A module with fewer parameters than the largest block by this factor is no group of its own."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Modules of a model, none within another; what is in none of them is the root's."""

    blocks: tuple[nn.Module, ...]
    """Alike, as the layers of a transformer."""
    others: tuple[nn.Module, ...]
    """Besides blocks, modules with a quarter of all parameters; without blocks, any large module."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((*self.blocks, *self.others))


def find_groups(model: nn.Module, wrap: Sequence[type[nn.Module]] | None = None) -> Groups:
    """Find blocks: children of one class in the outermost lists, or those of ``wrap``; then large modules besides them.

    Modules that share a parameter with one outside are left to the root, as nobody else has it whole for both.
    """
    if wrap is not None:
        blocks = list(_outermost(model, tuple(wrap)))
        if not blocks:
            names = ", ".join(kind.__qualname__ for kind in wrap)
            raise OptionError(f"DataParallel: the model has no module of wrap={names}. Pass the classes of its blocks.")
        others: list[nn.Module] = []
    else:
        blocks = [b for b in _blocks_in_lists(model) if num_parameters(b)]
        largest = max(map(num_parameters, blocks), default=0)
        blocks = [b for b in blocks if num_parameters(b) * _LEAST >= largest]
        total = num_parameters(model)
        others = list(_large_children(model, set(blocks), total // (4 if blocks else _LEAST) or 1))
    blocks, others = list(dict.fromkeys(blocks)), list(dict.fromkeys(others))  # one may be in a list many times
    shared = _shared_parameters(model, [*blocks, *others])
    blocks, others = ([m for m in part if shared.isdisjoint(map(id, m.parameters()))] for part in (blocks, others))
    return Groups(tuple(blocks), tuple(others))


def num_parameters(module: nn.Module) -> int:
    """Count the elements of a module's parameters; tied ones once."""
    return sum(p.numel() for p in module.parameters())


def _outermost(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, kinds):
            yield child
        else:
            yield from _outermost(child, kinds)


def _blocks_in_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of one class in the outermost lists; of lists of lists, those within."""
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(module, ParametrizationList)
    listed = module._modules.values() if is_list else ()  # each as often as it is called, where children() has it once
    counts = Counter(type(child) for child in listed if child is not None and num_parameters(child))
    for child in module.children():
        is_open = counts[type(child)] < 2 or type(child) in (nn.ModuleList, nn.Sequential)
        found = list(_blocks_in_lists(child)) if is_open else []
        if found:
            yield from found
        elif counts[type(child)] > 1 and not isinstance(child, _CONTAINERS):
            yield child


def _large_children(module: nn.Module, blocks: set[nn.Module], least: int) -> Iterator[nn.Module]:
    """Yield the modules besides the blocks that are large enough, and have none of them within."""
    for child in module.children():
        if child in blocks:
            continue
        is_open = isinstance(child, _CONTAINERS) or any(m in blocks for m in child.modules())
        is_most = not blocks and num_parameters(child) * 2 > num_parameters(module)
        found = list(_large_children(child, blocks, least)) if is_open or is_most else []
        if found or is_open:
            yield from found
        elif num_parameters(child) >= least:
            yield child


def _shared_parameters(model: nn.Module, groups: Sequence[nn.Module]) -> set[int]:
    """Return the parameters that are in several groups, or both in one and outside of all."""
    owners: dict[int, set[int]] = {}
    group_of = {id(m): i for i, group in enumerate(groups) for m in group.modules()}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), set()).add(group_of.get(id(module), -1))
    return {key for key, found in owners.items() if len(found) > 1}


LEVELS = ("parameters", "gradients", "optimizer")
PRECISIONS = {None: None, "fp32": None, "bf16": torch.bfloat16}
_ENGINES = ("auto", "threads", "compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a model is sharded."""

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
    """Check the options of a ``DataParallel``; None where the model isn't to be sharded."""
    alone = {"wrap": wrap, "precision": precision, "checkpoint_activations": checkpoint_activations}
    if shard is None:
        given = next((name for name, value in alone.items() if value is not None), None)
        if given is not None:
            raise OptionError(f"DataParallel: {given} needs shard=, one of {LEVELS}. TrainStep also has precision=.")
        return None
    kinds = [wrap] if isinstance(wrap, type) else wrap
    is_classes = kinds is None or all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)
    recomputed = (None, "blocks")
    checks = (
        ("shard", shard, LEVELS, shard in LEVELS),
        ("wrap", wrap, "a list of module classes", is_classes),
        ("precision", precision, tuple(PRECISIONS), precision in PRECISIONS),
        ("checkpoint_activations", checkpoint_activations, recomputed, checkpoint_activations in recomputed),
        ("engine", engine, f"one of {_ENGINES} with shard=", engine in _ENGINES),
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
    """Refuse a process that has no other ranks, or several devices."""
    group = init_single() if group is None else group
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
    """Refuse a model that FSDP2 can't shard, or would spoil without a word."""
    if is_compiled(module):
        _refuse("the model is compiled as a whole", "Pass the bare model, and engine='compile', which compiles blocks")
    for path, child in module.named_modules():
        stem = f"{path}." if path else ""
        for name, p in child.named_parameters(recurse=False):
            if is_lazy(p):
                _refuse(f"{stem}{name} is lazy and has no shape", "Run one batch through the model first")
            if p.ndim == 0:
                _refuse(f"parameter {stem}{name} is of shape (), which has no rows to shard", "Make it of shape (1,)")
            if p.is_sparse or (isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse):
                _refuse(f"{stem}{name} has sparse gradients", "Pass sparse=False")
        buffers = [name for name, buffer in child.named_buffers(recurse=False) if buffer.is_meta]
        saved = {key.rpartition(".")[2] for key in child.state_dict(keep_vars=True)} if buffers else set()
        for name in buffers:
            if name not in saved:
                _refuse(
                    f"buffer {stem}{name} is on the meta device and in no checkpoint, so nothing could fill it",
                    f"Make {path or 'the model'} again outside of torch.device('meta'), and put it in its place",
                )


def check_groups(module: nn.Module, groups: Groups) -> None:
    """Refuse parameters of several dtypes that train in one group."""
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


class OldParameters:
    """The parameters that a model had before it was sharded, which others have replaced.

    An optimizer made from them trains nothing, and raises nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._params = [(name, weakref.ref(p)) for name, p in module.named_parameters()]

    def check(self) -> None:
        """Raise an OptimizerError where an optimizer still has one."""
        alive = {id(p): name for name, ref in self._params if (p := ref()) is not None}
        # By type: isinstance asks objects for ``__class__``, and some load modules then.
        objects: list[Any] = gc.get_objects() if alive else []
        for optimizer in (x for x in objects if issubclass(type(x), Optimizer)):
            for group in optimizer.param_groups:
                name = next((alive[id(p)] for p in group["params"] if id(p) in alive), None)
                if name is not None:
                    raise OptimizerError(
                        f"DataParallel: {type(optimizer).__name__} was made before the model was wrapped, and would "
                        f"train nothing: {name} and the others have new parameters now. Make the optimizer from "
                        f"model.parameters() after DataParallel(model, shard=...)."
                    )


@functools.cache
def refuse_steps() -> None:
    """Raise at steps of torch's optimizers that can't update shards; else operators inside them would."""

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        is_fused = isinstance(optimizer, (SGD, Adagrad)) and any(g.get("fused") for g in optimizer.param_groups)
        if not is_fused and not isinstance(optimizer, (Adafactor, LBFGS, Rprop)):
            return
        if any(is_shard(p) for group in optimizer.param_groups for p in group["params"]):
            raise OptimizerError(
                f"DataParallel: torch's {type(optimizer).__name__} can't update parameters that are sharded over "
                f"ranks{', with fused=True. Leave that out' if is_fused else ''}. AdamW, Adam, NAdam, RAdam, Adamax, "
                f"Adagrad, Adadelta, RMSprop, ASGD, Muon and SGD can."
            )

    register_optimizer_step_pre_hook(check)


def _refuse(what: str, todo: str) -> NoReturn:
    raise ModuleError(f"DataParallel: shard= can't share this model out: {what}. {todo}.")
