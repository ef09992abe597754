"""Tensors, autograd, modes, containers, CUDA and process groups: private torch except its compiler."""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules import batchnorm
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree
from torch.utils._device import DeviceContext as _DeviceContext
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._triton import has_triton as _has_triton
from torch.utils.data._utils.worker import _generate_state
from torch.utils.data.dataloader import _BaseDataLoaderIter

make_subclass = Tensor._make_subclass
"""Show a tensor's memory as another class's; ``as_subclass`` keeps the graph, where this one makes a leaf."""

make_wrapper_subclass = Tensor._make_wrapper_subclass
"""Make a tensor with a shape, a dtype and a device, but no memory: what DTensor and other subclasses are made by."""

throw_on_data_ptr = torch._C._set_throw_on_mutable_data_ptr
"""Make C++ code that takes a pointer into a tensor without memory raise, rather than read from nowhere."""


def num_storage_uses(x: Tensor) -> int:
    """Count the tensors, in Python and in graphs, that refer to a tensor's memory; as torch's own CUDA graph trees."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


reshape_alias: Any = torch.ops.aten._reshape_alias.default
"""View a tensor as it is, by an operation for which ``ShardedBatch`` has no rule: ``aten.alias`` has one."""


swap_tensors = torch._C._swap_tensor_impl
"""Exchange what two tensors are, in C++; ``torch.utils.swap_tensors`` refuses tensors that have views."""

foreach_copy_ = torch._foreach_copy_
"""Copy a list of tensors into another in one launch."""

foreach_mul_ = torch._foreach_mul_
"""Multiply each tensor of a list in one launch."""

foreach_norm = torch._foreach_norm
"""Return each tensor's norm; ``torch.nn.utils.get_total_norm`` returns one for all of them."""

unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply gradients by a scale's inverse and note what isn't finite, as ``GradScaler`` does, for one optimizer."""

update_scale_ = torch._amp_update_scale_
"""Grow or shrink a loss scale, as ``GradScaler.update`` does, without waiting for the device."""


SavedTensorHooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a saved tensor, and what unpacks it."""


def top_saved_tensor_hooks() -> SavedTensorHooks | None:
    """Return the innermost saved-tensor hooks of this thread, which ``torch.autograd.graph`` only enters and leaves."""
    # True: no error where hooks are disabled, as within ``disable_saved_tensors_hooks``.
    found: SavedTensorHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


NO_BACKWARD = -1
"""What ``backward_id`` returns outside of one."""


def backward_id() -> int:
    """Return torch's number of the backward of which this thread runs a node; torch has no public name for it."""
    return torch._C._current_graph_task_id()


def will_execute(node: Node) -> bool:
    """Whether the running backward executes a node; a RuntimeError for a leaf's within ``torch.autograd.grad``."""
    return torch._C._will_engine_execute_node(node)


def after_backward(function: Callable[[], None]) -> None:
    """Call a function when the running backward is done, as DistributedDataParallel does."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


class NllLoss(NamedTuple):
    """What ``nll_loss``, in which ``cross_entropy`` of classes ends, has saved for its backward."""

    target: Tensor
    weight: Tensor | None
    """Of each class."""
    ignore_index: int
    is_mean: bool
    total_weight: Tensor
    """What its mean is divided by, in the dtype of the loss."""


def nll_loss_of(node: Node | None) -> NllLoss | None:
    """Return what an autograd node has saved if it is ``nll_loss``'s, for which torch has no public name.

    None also where saved-tensor hooks have packed it, as a checkpoint's would compute it again, and after a backward.
    """
    if node is None or node.name() not in ("NllLossBackward0", "NllLoss2DBackward0"):
        return None
    found: Any = node
    try:
        saved = (found._raw_saved_target, found._raw_saved_weight, found._raw_saved_total_weight)
        if any(x.unpack_hook is not None for x in saved):
            return None
        ignore_index = (found._saved_ignore_index + 2**63) % 2**64 - 2**63  # torch shows it without its sign
        is_mean = found._saved_reduction == 1
        return NllLoss(found._saved_target, found._saved_weight, ignore_index, is_mean, found._saved_total_weight)
    except RuntimeError:  # freed, or written since
        return None


def is_transforming() -> bool:
    """Whether a transformation of ``torch.func``, or forward-mode differentiation, is under way in this thread."""
    return are_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def are_batched(grads: Iterable[Tensor | None]) -> bool:
    """Whether a gradient represents several under ``vmap``, as with ``is_grads_batched=True``."""
    functorch = torch._C._functorch
    return any(functorch.is_legacy_batchedtensor(g) or functorch.is_batchedtensor(g) for g in grads if g is not None)


are_transforms_active = torch._C._are_functorch_transforms_active
"""Whether a transformation of ``torch.func`` is under way."""


DeviceContext = _DeviceContext
"""The function mode of ``with torch.device(...)`` and ``torch.set_default_device``, whose class isn't exported."""

device_constructors: Any = _device_constructors
"""Returns the functions to which ``DeviceContext`` gives its device, where they are called without one."""

push_function_mode: Any = _push_mode
"""Enter a function mode without its ``__enter__``: a mode that was entered in one thread is carried to another."""

pop_function_mode: Any = _pop_mode
"""Leave the innermost function mode without its ``__exit__``."""

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""The context manager in which subclasses' ``__torch_function__`` isn't called, as "Extending PyTorch" documents it."""


def function_modes() -> list[Any]:
    """Return the function modes that are entered now, the outermost first."""
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def num_dispatch_modes() -> int:
    """Count the ``TorchDispatchMode``s that are entered now."""
    return torch._C._len_torch_dispatch_stack()


def is_tracing() -> bool:
    """Whether the mode of fake tensors, or of ``make_fx``'s proxies, is entered now: they have a place each."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACING_MODES
    )


_TRACING_MODES = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)

TorchDispatchMode = _TorchDispatchMode
"""Sees every operation of this thread that reaches torch's dispatcher; "Extending PyTorch" documents it."""

without_dispatch_modes = _disable_current_modes
"""The context manager in which no ``TorchDispatchMode`` is entered; tensor subclasses are dispatched as before."""


def reading_lazy_values() -> AbstractContextManager[None]:
    """Make operations conjugate, negate and fill in what is marked so, as ``linalg.pinv`` marks its own tensors.

    Below ``__torch_dispatch__`` torch leaves these keys out, and reads raw memory.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(include, exclude - _LAZY)
    return guard


_LAZY_KEYS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)
_LAZY = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, _LAZY_KEYS))


def replicates_itself(m: nn.Module) -> bool:
    """Whether a module has a way of its own to be copied, by which ``torch.nn.parallel.replicate`` copies it."""
    known = nn.Module._replicate_for_data_parallel, nn.RNNBase._replicate_for_data_parallel
    return type(m)._replicate_for_data_parallel not in known


def caches_parametrizations() -> bool:
    """Whether ``torch.nn.utils.parametrize.cached`` is entered now."""
    return bool(parametrize._cache_enabled)


def cache_parametrizations_apart(modules: Iterable[nn.Module]) -> None:
    """Make ``parametrize.cached`` keep each module's values: torch takes others of its class, as copies, for it."""
    for m in filter(parametrize.is_parametrized, modules):
        kind, cache = type(m), parametrize._cache
        for name in m.parametrizations:  # type: ignore[union-attr]
            found = getattr(kind, name)
            if not hasattr(found.fget, "__wrapped__"):
                setattr(kind, name, property(_cached(name, found.fget), found.fset))
                if (id(m), name) in cache:
                    cache[m, name] = cache[id(m), name]  # type: ignore[index]


def _cached(name: str, compute: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    @functools.wraps(compute)
    def get(self: Any) -> Tensor:
        if not parametrize._cache_enabled:
            return compute(self)
        cache: dict[Any, Tensor] = parametrize._cache  # type: ignore[assignment]
        if (self, name) not in cache:
            cache[self, name] = self.parametrizations[name]()
        return cache[self, name]

    return get


NormBase = batchnorm._NormBase
"""Every batch and instance normalisation; the exported classes have no other base in common."""

BatchNorm = batchnorm._BatchNorm
"""Every batch normalisation, for inputs of any number of axes."""


SUPPORTED_NODES = _pytree.SUPPORTED_NODES
"""Container classes that torch, or a library, has registered, with what flattens and rebuilds them."""

tree_flatten = _pytree.tree_flatten
"""Split a tree into its leaves and what rebuilds it."""

tree_unflatten = _pytree.tree_unflatten
"""Rebuild a tree from leaves."""

tree_map_only = _pytree.tree_map_only
"""Build the same tree with a function called on the leaves of one class."""


numpy_seed_of_worker: Callable[[int, int], list[int]] = _generate_state
"""Give NumPy's seed of a DataLoader's worker, which torch makes of the loader's and the worker's number."""

LoaderIterator = _BaseDataLoaderIter
"""The class of what ``iter(DataLoader(...))`` returns, which distinguishes another loader's iterator."""

remove_worker_pids = torch._C._remove_worker_pids
"""Make torch's signal handler no longer watch an iterator's worker processes, by the iterator's ``id``.

The handler raises in the main thread, wherever that is; DataLoader has no option to leave it out.
"""


def route_stream_to_pool(device: torch.device, pool: Any) -> None:
    """Allocate what is asked for on a device's current stream from a graph's pool, in all threads.

    ``torch.cuda.graph`` does so for the capturing device only, ``torch.cuda.use_mem_pool`` for one thread.
    """
    torch._C._cuda_beginAllocateCurrentStreamToPool(device.index, pool)


def end_route_to_pool(device: torch.device, pool: Any) -> None:
    """End ``route_stream_to_pool``; raises a RuntimeError where it hadn't begun."""
    torch._C._cuda_endAllocateToPool(device.index, pool)


def release_pool(device: torch.device, pool: Any) -> None:
    """Give up a pool that ``route_stream_to_pool`` took: its memory is returned with the last tensor in it."""
    torch._C._cuda_releasePool(device.index, pool)


def clear_cublas_workspaces() -> None:
    """Drop cuBLAS's workspaces, as torch's CUDA graph trees do before a capture: a graph gets its own."""
    torch._C._cuda_clearCublasWorkspaces()


def has_nccl() -> bool:
    """Whether torch was built with NCCL; ``torch.cuda.nccl.is_available`` warns where it wasn't."""
    return hasattr(torch._C, "_nccl_all_reduce")


def has_triton() -> bool:
    """Whether Triton is installed and has a device to compile for; the module is torch's compiler's own."""
    return bool(_has_triton())


def default_store() -> Any:
    """Return the store of the process group, for which torch has no public name."""
    return torch.distributed.distributed_c10d._get_default_store()


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Make a process group in which this process is rank 0 and the others are absent: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its backend has no public name

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def unflatten(state: Any, places: Any) -> Any:
    """Restore a distributed checkpoint's nested values by name; torch's inverse has no public name."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # takes half a second

    return unflatten_state_dict(state, places)
