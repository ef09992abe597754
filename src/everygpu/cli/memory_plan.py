"""What training a model takes of each GPU, counted without one: on the meta device, as rank 0 of ranks that aren't."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from everygpu import tree
from everygpu.parallel.fully_sharded.options import LEVELS, PRECISIONS, Sharding, find_groups, num_parameters
from everygpu.parallel.fully_sharded.shards import local_part
from everygpu.parallel.fully_sharded.wrap import apply
from everygpu.torch_private.core import fake_ranks

STATES_BYTES = 8
"""AdamW's, of each element that trains: two moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of each GPU."""

    way: str
    parameters: int
    gradients: int
    states: int
    whole: int
    """Parameters and gradients that are whole for a while."""
    activations: int
    """What backward needs of forward."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.states + self.whole + self.activations


def plan_memory(model: nn.Module, run: Callable[[nn.Module], Any] | None, num_gpus: int, precision: str) -> list[Need]:
    """Count what each way to train a model takes of a GPU, from all of it on each to the least.

    Args:
        model: On the meta device; it is unusable afterwards.
        run: Calls it on one GPU's batch, on the meta device, and returns what backward begins with; None leaves
            activations out.
        num_gpus: In all.
        precision: ``"fp32"`` or ``"bf16"``.
    Source:
        FSDP2, which has two groups whole at once, as the next is fetched early, and one group's gradients, twice: as
        backward makes them, and as they are summed. The root's group, and what comes after the blocks, stay whole.
    """
    groups = find_groups(model)
    dtype = PRECISIONS[precision]
    size = 4 if dtype is None else dtype.itemsize
    kept, again = (0, 0) if run is None else _activations(model, run, dtype)
    rest = num_parameters(model) - sum(map(num_parameters, groups.blocks))
    largest = max([rest, *map(num_parameters, groups)])
    moving = 2 * largest * size + largest * (size + 4)
    everything = num_parameters(model) * size

    def need(way: str, whole: int, activations: int = kept) -> Need:
        parts = [(local_part(p), p.requires_grad) for p in model.parameters()]
        trained = [p for p, requires_grad in parts if requires_grad]
        return Need(
            way=way,
            parameters=sum(p.nbytes for p, _ in parts),
            gradients=sum(p.nbytes for p in trained),
            states=sum(p.numel() for p in trained) * STATES_BYTES,
            whole=whole,
            activations=activations,
        )

    found = [need("whole on each GPU", 0 if dtype is None else everything)]
    with fake_ranks(num_gpus):
        mesh = init_device_mesh("cpu", (num_gpus,))
        apply(model, groups, Sharding(level="parameters"), mesh, torch.device("cpu"))
        found += [need(f'shard="{level}"', everything + moving) for level in LEVELS[:0:-1]]
        found.append(need('shard="parameters"', rest * size + moving))
        if run is not None and groups.blocks:
            found.append(need('shard="parameters", checkpoint_activations="blocks"', rest * size + moving, again))
    return found


def _activations(model: nn.Module, run: Callable[[nn.Module], Any], dtype: torch.dtype | None) -> tuple[int, int]:
    """Count what is saved for backward; and what is where blocks keep their inputs, and one is computed again."""
    model = copy.deepcopy(model) if dtype is None else copy.deepcopy(model).to(dtype)
    saved = _Saved(model)
    for block in find_groups(model).blocks:
        block.register_forward_pre_hook(saved.enter, with_kwargs=True)
        block.register_forward_hook(saved.leave)
    if dtype is not None:
        model.register_forward_pre_hook(lambda _, args, kwargs: _cast((args, kwargs), dtype), with_kwargs=True)
    with saved_tensors_hooks(saved.pack, lambda t: t), _FlashAttention():
        run(model)
    return sum(saved.of_blocks) + saved.outside, saved.inputs + max(saved.of_blocks, default=0) + saved.outside


class _Saved:
    """Counts the memory that a forward saves for backward, once for all tensors that share it."""

    def __init__(self, model: nn.Module) -> None:
        self.outside = self.inputs = 0
        self.of_blocks: list[int] = []
        self._is_inside = False
        self._known: dict[int, torch.UntypedStorage] = {}  # held, as another may come to the same address
        for t in (*model.parameters(), *model.buffers()):
            self._is_new(t)

    def enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._is_inside = True
        self.of_blocks.append(0)
        tensors = {t.untyped_storage()._cdata: t for _, t in tree.leaves((args, kwargs), "") if isinstance(t, Tensor)}
        self.inputs += sum(t.untyped_storage().nbytes() for t in tensors.values() if t.requires_grad)

    def leave(self, block: nn.Module, args: Any, output: Any) -> None:
        self._is_inside = False

    def pack(self, t: Tensor) -> Tensor:
        if self._is_new(t):
            num_bytes = t.untyped_storage().nbytes()
            if self._is_inside:
                self.of_blocks[-1] += num_bytes
            else:
                self.outside += num_bytes
        return t

    def _is_new(self, t: Tensor) -> bool:
        storage = t.untyped_storage()
        is_new = storage._cdata not in self._known
        self._known[storage._cdata] = storage
        return is_new


class _FlashAttention(TorchFunctionMode):
    """Has attention save what its kernels on GPUs do, where the meta device's saves all scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and len(args) >= 3:
            return _Attention.apply(*args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.saved_tensors[:3]


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return tree.map_leaves(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, batch)
