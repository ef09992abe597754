"""What a sharded model does around each forward, on each rank."""

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from everygpu.errors import CallError
from everygpu.parallel.fully_sharded.options import OldParameters, Sharding
from everygpu.parallel.fully_sharded.shards import is_shard
from everygpu.parallel.fully_sharded.wrap import explaining_parts, reshard
from everygpu.parallel.ranks import RankModel, WeightedForward, check_hooks, write_from_first
from everygpu.parallel.reducer import Anchor
from everygpu.parallel.replicas.module_tree import ModuleTree
from everygpu.parallel.scatter.batch_weight import Weight
from everygpu.ranks.group import Group


class ShardedRankModel(RankModel):
    """Weights each rank's outputs in the gradients that FSDP2 averages over ranks; ``old`` are the parameters that the
    module had before it was sharded.
    """

    def __init__(
        self,
        group: Group,
        dim: int,
        weight: Weight | None,
        module: nn.Module,
        sharding: Sharding,
        old: OldParameters,
    ) -> None:
        super().__init__(group, dim, 1, None, weight)
        self.sharding = sharding
        self._module = module
        self._old: OldParameters | None = old
        self._methods: set[str] = set()
        self._digest = 0
        """Of the parameters to which backwards since the last forward have given gradients."""
        self._device = next(module.parameters()).device
        self._trees = [ModuleTree(module)]
        """The model with its shards, and as a forward leaves it, with parameters that are still whole."""
        self._is_held = False
        self._anchor = Anchor()
        # Those that are saved: the others are constants, such as a rotary embedding's, and a broadcast takes time.
        saved = module.state_dict().keys()
        named = [
            (f"{name}.{key}".lstrip("."), m._buffers, key) for name, m in module.named_modules() for key in m._buffers
        ]
        self._slots = [(table, key) for name, table, key in named if name in saved]

    def forward(self, run: Callable[..., Any], module: nn.Module, inputs: Any, kwargs: Any, *more: Any) -> Any:
        """Return a forward's output; its gradients will be weighted by this rank's rows."""
        if torch.is_grad_enabled():
            self._check_parameters()
        return super().forward(partial(self._call, run), module, inputs, kwargs, *more)

    def _check_parameters(self) -> None:
        if self._old is not None:
            self._old.check()  # of parameters that were listed before, an optimizer may have been made since
            self._old = None
            named = dict(self._module.named_parameters())
            check_hooks(named)
            for i, p in enumerate(named.values()):
                if p.requires_grad:
                    note = partial(self._note, i.to_bytes(4, "little"))
                    p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        if any(tree.is_same() for tree in self._trees):
            return
        whole = {id(p) for tree in self._trees for p in tree.tensors}
        for name, p in self._module.named_parameters():
            if not (is_shard(p) or id(p) in whole):
                raise CallError(
                    f"DataParallel: parameter {name} came after the model was sharded over ranks, which reduce nothing "
                    f"of it. Change the model first, then wrap it: DataParallel(model, shard={self.sharding.level!r})."
                )

    def _note(self, key: bytes, _: Tensor) -> None:
        self._digest = zlib.crc32(key, self._digest)

    def _compare_backward(self, digests: list[float]) -> None:
        """Refuse to continue where FSDP2 has summed gradients of one parameter and, on another rank, of another."""
        if len(set(digests)) > 1:
            raise CallError(
                "DataParallel: the last backward gave gradients to other parameters on some ranks than on others, as a "
                "branch that only some rows take does, and FSDP2 has mixed them up: go back to the last checkpoint. "
                "Have all ranks use all parameters, for instance with 0 * sum(p.sum() for p in module.parameters())."
            )

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_training, digest, self._digest = torch.is_grad_enabled(), self._digest, 0
        wait = self.group.begin_list(float(digest)) if is_training else None
        try:
            with explaining_parts():
                output = function(*args, **kwargs)
        except BaseException:
            # Else the next forward gathers parameters without waiting for the optimizer. torch has it from 2.13 on.
            with contextlib.suppress(RuntimeError):  # of a first forward that didn't get as far as the root's
                getattr(self._module, "reset_iter_state", lambda: None)()
            raise
        if wait is None:
            reshard(self._module)
        else:
            self._compare_backward(wait())
            if not self._trees[-1].is_same():
                self._trees[1:] = [ModuleTree(self._module)]
        return output

    def _begin_forward(self, batch: Any) -> WeightedForward:
        return WeightedForward(self.group, self._anchor, self._anchor.is_reached)

    def call_as_forward(self, name: str) -> None:
        """Gather the parameters for a method of the model, as for forward: ``generate`` calls parts of the model."""
        if name in self._methods:
            return
        from torch.distributed.fsdp import register_fsdp_forward_method  # takes two seconds

        self._methods.add(name)
        register_fsdp_forward_method(self._module, name)
        method = getattr(self._module, name)
        setattr(self._module, name, functools.wraps(method)(partial(self._call, method)))

    def copy_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers, in training."""
        if module.training:
            found = (table.get(key) for table, key in self._slots)
            write_from_first(self.group, [b for b in found if b is not None])

    def _check_apart(self, module: nn.Module) -> None:
        self._check_parameters()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """At ``"optimizer"``, keep whole gradients and parameters from backwards within to the first one after it.

        At the other levels gradients are sharded after every backward: whole ones may not fit.
        """
        root: Any = self._module
        holds = self.sharding.level == "optimizer" and not self._is_held
        if holds:
            self._is_held = True
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False)
        try:
            yield
        finally:
            if holds:
                self._is_held = False
                root.set_requires_gradient_sync(True)
                root.set_reshard_after_backward(True)


def is_sharded(wrapper: Any) -> bool:
    """Whether a ``DataParallel`` has a part of each parameter on every rank."""
    return isinstance(wrapper.rank_model, ShardedRankModel)
