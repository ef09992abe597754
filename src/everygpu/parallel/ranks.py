"""A model on one of several ranks: all start equal, and each forward's gradients are weighted by its rows."""

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from everygpu import comm, tree
from everygpu.devices.parse import may_share_gpus
from everygpu.errors import CallError, DeviceError
from everygpu.parallel.buckets import REPLICA_BYTES, group_tensors, replica_bucket_bytes
from everygpu.parallel.reducer import Anchor, GradHook, ModelGrads, Reducer
from everygpu.parallel.replicas.module_tree import ModuleTree
from everygpu.parallel.scatter.batch_weight import Weight, weight_batch
from everygpu.parallel.scatter.denominator import LabelCheck, denominator_of, note_denominator
from everygpu.parallel.sharded.batch import ShardedBatch, shard_batch
from everygpu.ranks.group import Group, forward_of
from everygpu.torch_private.core import foreach_copy_, is_transforming

logger = logging.getLogger("everygpu")


def check_equal_on_ranks(group: Group, module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module; a RankError on every rank if names, shapes or dtypes differ."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    rows = {name: (tuple(t.shape), str(t.dtype)) for name, t in named.items()}
    group.check_same("parameters and buffers of the model", rows)
    return list(named.values())


def check_devices(group: Group, devices: Sequence[torch.device]) -> None:
    """Refuse ranks that share a GPU: NCCL can't have two of them there, and says so late and in words of its own."""
    mine = [str(torch.cuda.get_device_properties(d).uuid) for d in devices if d.type == "cuda"]
    if not group.uses_nccl or may_share_gpus():
        mine = []
    of_ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(group.gather(mine)):
        for uuid in found:
            of_ranks.setdefault(uuid, []).append(rank)
    shared = next((ranks for ranks in of_ranks.values() if len(ranks) > 1), None)
    if shared is not None:
        raise DeviceError(
            f"DataParallel: every rank must have GPUs of its own, got one on ranks {shared[0]} and {shared[1]}. Leave "
            f"device_ids out, or pass [int(os.environ['LOCAL_RANK'])]."
        )


@torch.no_grad()
def copy_from_first(group: Group, tensors: Sequence[Tensor]) -> None:
    """Write rank 0's values into the other ranks' tensors."""
    for indices in group_tensors(tensors, lambda t: (t.dtype, t.device), REPLICA_BYTES):
        members = [tensors[i] for i in indices]
        flat = torch.cat([t.reshape(-1) for t in members])
        group.broadcast(flat)
        if group.rank:
            parts = torch.split(flat, [t.numel() for t in members])
            foreach_copy_(members, [part.view(t.shape) for part, t in zip(parts, members)])


def write_from_first(group: Group, buffers: Sequence[Tensor]) -> None:
    """Write rank 0's values into the other ranks' buffers, as if the forwards of this rank had made them.

    That doesn't count as a write: a backward to come may need a buffer whose values are the
    same, and one that needs values which a forward has changed is torch's error on rank 0.
    """
    copy_from_first(group, [b.detach() if b.is_inference() else b.data for b in buffers])


class WeightedForward:
    """One forward of a wrapped model, whose gradients count by its weight over the mean of all ranks'.

    Backward multiplies gradients where they enter the forward, at its outputs, and divides where they leave it, at its
    inputs: a gradient between two models, or of an input, is that of this rank's own loss. Within
    ``torch.autograd.grad`` gradients pass unchanged, and results computed from them are weighted in turn.

    ``anchor`` takes part in the forward. ``accumulates`` is called when backward comes here, and returns whether that
    adds to leaves' ``.grad``.
    """

    def __init__(self, group: Group, anchor: Anchor, accumulates: Callable[[], bool]) -> None:
        self._group = group
        self._anchor = anchor
        self.accumulates = accumulates
        self._factor: Tensor | None = None
        self._wait: Callable[[], None] | None = None

    def count(self, weight: float | Tensor, device: torch.device, *, at_once: bool) -> None:
        """Note the weight, and start the sum of all ranks' at once or in backward, where nothing waits for it."""
        if isinstance(weight, Tensor):
            self._own = comm.copy(weight, device).to(torch.float64)
        else:
            self._own = torch.full((), weight, dtype=torch.float64, device=device)  # no copy from the host, which waits
        self._may_be_zero = isinstance(weight, Tensor) or not weight
        if at_once:
            self._start(in_graph=False)

    def _start(self, *, in_graph: bool) -> Callable[[], None]:
        self._total = self._own.clone()
        self._wait = self._group.all_reduce(self._total, in_graph=in_graph)
        return self._wait

    def factor(self) -> Tensor:
        """Return the weight over the mean of all ranks', shape ()."""
        if self._factor is None:
            with torch.no_grad():
                wait = self._wait or self._start(in_graph=True)
                wait()
                self._factor = self._own * self._group.size / self._total
                if self._group.sums_by_tree and self._factor.item() != 1:
                    raise CallError(
                        "DataParallel: with num_replicas all ranks' batches must count alike, by their rows or labels, "
                        "or gradients would be rounded otherwise than in one process. Give each rank as many, or run "
                        "in one process."
                    )
        return self._factor

    def weight(self, grad: Tensor, *, enters: bool) -> Tensor:
        """Weight a gradient that enters the forward, or undo that where it leaves; that of a rank whose rows count
        nothing, whose mean is nan, becomes zero.
        """
        factor = comm.copy(self.factor() if enters else 1 / self.factor(), grad.device)
        if grad.dtype in _HALF and grad.layout is torch.strided:  # in one kernel, whose factor isn't rounded
            scaled = torch.mul(grad, factor.float().view([1] * grad.ndim), out=torch.empty_like(grad))
        else:
            scaled = grad * factor.to(grad.real.dtype if grad.is_complex() else grad.dtype)
        return torch.where(self.factor() == 0, 0, scaled) if self._may_be_zero else scaled

    def enter(self, inputs: Any) -> Any:
        """Return a forward's inputs; those that take gradients get them as they are outside."""
        return self._map(lambda x: _Boundary.apply(x, None, self), inputs)  # type: ignore[no-untyped-call]

    def leave(self, output: Any) -> Any:
        """Return a forward's output, through which gradients come in weighted."""
        return self._map(self._leave, output)

    def _leave(self, x: Tensor) -> Tensor:
        found: Tensor = _Boundary.apply(x, self._anchor.leaf, self)  # type: ignore[no-untyped-call]
        total = denominator_of(x) if x.numel() == 1 else None
        if total is not None:
            note_denominator(found, total)
        return found

    def _map(self, function: Callable[[Tensor], Tensor], values: Any) -> Any:
        """Map all tensors that take gradients; each once, wherever it is."""
        done: dict[int, Tensor] = {}  # ``values`` keeps the objects that the ids belong to

        def change(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad:
                return x
            if id(x) not in done:
                done[id(x)] = _per_shard(function, x)
            return done[id(x)]

        def change_leaf(leaf: Any) -> Any:
            return leaf._replace(data=change(leaf.data)) if isinstance(leaf, PackedSequence) else change(leaf)

        return tree.map_leaves(change_leaf, values)


class _Boundary(torch.autograd.Function):
    """An alias of what a forward is given, whose gradients leave the forward, or of what it returned, with the anchor,
    whose gradients enter it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, forward: WeightedForward) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weighted, ctx.is_output = forward, anchor is not None
        return x.detach()  # unlike a view, which torch lets nobody write to; writes count for both

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        weighted, enters = ctx.weighted, ctx.is_output
        if weighted.accumulates():
            return None if grad is None else weighted.weight(grad, enters=enters), None, None
        if grad is None or not torch.is_grad_enabled():
            return grad, None, None
        return (weighted.enter if enters else weighted.leave)(grad), None, None


def _per_shard(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call a function with a tensor, or with each shard of a batch; keep what is a class of the user's."""
    if isinstance(x, ShardedBatch):
        return shard_batch(list(map(function, x.shards)), x.device, x.shard_dim, x.shard_rows)
    found = function(x)
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        vars(found).update(vars(x))
    return found


_HALF = (torch.float16, torch.bfloat16)


def check_hooks(named: Mapping[str, Tensor]) -> None:
    """Refuse parameters whose hooks would see this rank's gradient alone."""
    for name, p in named.items():
        later = p._post_accumulate_grad_hooks
        if p._backward_hooks or (later and not all(isinstance(hook, GradHook) for hook in later.values())):
            raise CallError(
                f"DataParallel: a hook on parameter {name} would see the gradient of this rank's rows alone. Change "
                f"gradients after backward(), when they are those of all ranks, or remove the hook."
            )


def _refuse_backward() -> bool:
    raise CallError(
        "DataParallel: under torchrun a copy of a DataParallel starts to be trained in training mode, where all ranks "
        "get rank 0's values, got a backward in eval mode. Call copy.train() before its first forward."
    )


class RankModel:
    """Keeps a model, and its gradients, equal on all ranks.

    ``before`` was made for the same module before its options changed; backwards may still come to it.
    """

    def __init__(
        self,
        group: Group,
        dim: int,
        num_devices: int,
        bucket_cap_mb: float | None,
        weight: Weight | None,
        before: "RankModel | None" = None,
    ) -> None:
        self.group = group
        self._dim = dim
        self._num_devices = num_devices
        self._bucket_bytes = replica_bucket_bytes(bucket_cap_mb)
        self._weight = weight
        self._grads: ModelGrads | None = None if before is None else before._grads
        self._is_apart = self._has_stand_ins = False
        self._has_warned = self._are_generators_checked = False
        self._label_check = LabelCheck("DataParallel")
        self._tree: ModuleTree | None = None
        self._checked: list[Tensor] = [] if before is None else before._checked
        """Parameters that had rank 0's values once."""

    def forward(self, run: Callable[..., Any], module: nn.Module, inputs: Any, kwargs: Any, *more: Any) -> Any:
        """Return a forward's output; layers compute over all ranks' batches, and gradients will be averaged."""
        if self._is_apart:
            return run(inputs, kwargs, *more)
        if not torch.is_grad_enabled() or is_transforming():
            with forward_of(self.group):
                return run(inputs, kwargs, *more)
        self.group.first_batch.compare(self.group, (inputs, kwargs))
        self.copy_buffers(module)
        forward = self._begin_forward((inputs, kwargs))
        if forward is None:
            with forward_of(self.group):
                return run(inputs, kwargs, *more)
        find_weight = partial(
            weight_batch, self._weight, "DataParallel", inputs, kwargs, dim=self._dim, num_devices=self._num_devices
        )
        weight = None if self._weight is None else find_weight()  # before forward may write to the batch
        inputs, kwargs = forward.enter((inputs, kwargs))
        with forward_of(self.group):
            output = run(inputs, kwargs, *more, leave=forward.leave)
        if weight is None:
            weight = find_weight(output=output, check=self._label_check)
        # In eval mode a rank may be alone, as it looks at some samples.
        forward.count(weight, self._device, at_once=module.training)
        self._look_for_tensors(output)
        return output

    def _begin_forward(self, batch: Any) -> WeightedForward | None:
        """Return what weights the gradients of a forward; None where neither parameters nor inputs take any."""
        params = [p for p in self._params.values() if p.requires_grad]
        if not params and not any(isinstance(x, Tensor) and x.requires_grad for _, x in tree.leaves(batch, "")):
            return None
        self._device = next(iter(self._params.values())).device
        if self._grads is None:
            return WeightedForward(self.group, Anchor(), _refuse_backward)
        if not params:  # its layers may yet compute over all ranks' gradients
            reducer = Reducer.of(self.group)
            return WeightedForward(self.group, reducer.anchor, lambda: reducer.accumulates(reducer.anchor))
        check_hooks(self._params)
        self._grads.follow(params)
        return WeightedForward(self.group, self._grads.anchor, self._grads.on_output_grad)

    def _look_for_tensors(self, output: Any) -> None:
        """Warn, once, of tensors whose gradients aren't weighted, as they are in an object that isn't opened."""
        if self._has_warned or self.group.size == 1:
            return
        found = [leaf for _, leaf in tree.leaves(output, "")]
        if any(isinstance(x, Tensor) and x.requires_grad and x.numel() == 1 for x in found):
            return  # a loss, where backward begins
        for leaf in found:
            if not isinstance(leaf, Tensor) and any(x.requires_grad for x in tree.tensors_in(leaf)):
                self._has_warned = True
                logger.warning(
                    "ranks: the model returned tensors in a %s, whose gradients count equally on all ranks, whatever "
                    "rows these have. Return them in a tuple, dict or dataclass.",
                    type(leaf).__qualname__,
                )
                return

    def check_generators(self) -> None:
        """Refuse, once, ranks whose replicas would draw other random numbers than in one process."""
        if not self._are_generators_checked and torch.is_grad_enabled():
            self._are_generators_checked = True
            state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
            self.group.check_same("random numbers; give all ranks one seed, as by seed_all", {"CPU's generator": state})

    def copy_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers, in training: those that will be saved."""
        self.look_at(module)
        if module.training:
            write_from_first(self.group, self._buffers)

    def look_at(self, module: nn.Module, *, is_wrapped_now: bool = False) -> None:
        """Find the module's tensors again after some were replaced; all ranks start with rank 0's.

        A copy of a wrapper starts when it is trained: one rank may evaluate it alone.
        """
        if self._has_stand_ins:
            return
        if self._tree is None or self._tree.modules[0] is not module or not self._tree.is_same():
            self._tree = ModuleTree(module)
            self._params, self._buffers = dict(module.named_parameters()), list(module.buffers())
            alike = set(map(id, self._checked))
            self._checked = [p for p in self._params.values() if id(p) in alike]
        has_new = len(self._checked) < len(self._params)
        if is_wrapped_now or (has_new and (self._checked or module.training)):
            copy_from_first(self.group, check_equal_on_ranks(self.group, module))
            self._checked = list(self._params.values())
            if is_wrapped_now or self._grads is None:
                self._grads = Reducer.of(self.group).grads_of(module, self._bucket_bytes)

    @contextlib.contextmanager
    def apart(self, module: nn.Module) -> Iterator[None]:
        """Leave gradients and buffers to the caller, within the block."""
        if torch.is_grad_enabled():
            self._check_apart(module)
        before, self._is_apart = self._is_apart, True
        try:
            with forward_of(self.group):
                yield
        finally:
            self._is_apart = before

    @contextlib.contextmanager
    def with_stand_ins(self, module: nn.Module) -> Iterator[None]:
        """Take tensors that are put into the module within for its parameters; no rank waits for others."""
        self.look_at(module)
        self._has_stand_ins = True
        try:
            yield
        finally:
            self._has_stand_ins = False

    def _check_apart(self, module: nn.Module) -> None:
        self.look_at(module)
        check_hooks(self._params)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of backwards within to the first one after it."""
        grads = self._grads
        if grads is None:
            yield
            return
        before, grads.is_held = grads.is_held, True
        try:
            yield
        finally:
            grads.is_held = before


def own_devices(group: Group | None) -> Sequence[int | str] | None:
    """Return the devices of a rank that names none: its own, unless it is the only one of its machine."""
    if group is None or group.local_size == 1:
        return None
    return [group.local_rank] if torch.cuda.is_available() else ["cpu"]
