"""Functions of a ``ShardedBatch`` that never reach ``__torch_dispatch__``: memory, printing, copies, the mean."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everygpu.errors import GatherError, LossError
from everygpu.parallel.sharded.batch import ShardedBatch, join, joined_values
from everygpu.parallel.sharded.dispatch import Args, Kwargs, Rule
from everygpu.parallel.sharded.layout import JoinedValues, Memory
from everygpu.parallel.sharded.row_reductions import ROW_REDUCTIONS
from everygpu.torch_private.autograd import are_transforms_active
from everygpu.torch_private.compiler import is_scripted
from everygpu.torch_private.modes import without_torch_function
from everygpu.torch_private.pytree import tree_map_only
from everygpu.torch_private.tensors import swap_tensors


def function_for(func: Any) -> Rule:
    """Return the replacement of a function; by default one that calls the function itself."""
    # The fused kernels of scripts take pointers.
    return FUNCTIONS.get(func) or (_on_joined if is_scripted(func) else _call)


def _call(func: Any, args: Args, kwargs: Kwargs) -> Any:
    with without_torch_function():
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not any(text in str(error) for text in _NO_DATA_ERRORS):
                raise
        joined = tree_map_only(ShardedBatch, join, (args, kwargs))
        return func(*joined[0], **joined[1])


_NO_DATA_ERRORS = ("data is not allocated yet", "Cannot access data pointer", "invalid python storage")
"""torch's errors when C++ code takes a pointer, as of the lengths in ``ctc_loss``."""


def _on_joined(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call the function on the joined tensor, whose memory may be written through the result."""
    joined = [join(a) if isinstance(a, ShardedBatch) else a for a in args]
    result = func(*joined, **{k: join(v) if isinstance(v, ShardedBatch) else v for k, v in kwargs.items()})
    return next((a for a, j in zip(args, joined) if result is j), result)


def _on_memory(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a function that returns the memory itself, whatever modes are entered."""
    args[0]._memory.is_joined = True
    return func(joined_values(args[0]), *args[1:], **kwargs)


def _on_values(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a function that only reads the values."""
    return func(joined_values(args[0]), *args[1:], **kwargs)


def _formatted(func: Any, args: Args, kwargs: Kwargs) -> str:
    if func is Tensor.__format__ and args[1]:
        _refuse_one_each(args[0], "format", f'f"{{{{{{}}:{args[1]}}}}}"')
    with without_torch_function():
        return str(func(_JoinedValues.apply(args[0]), *args[1:], **kwargs))  # type: ignore[no-untyped-call]


class _JoinedValues(torch.autograd.Function):
    """The joined values, connected to the graph, for reading only."""

    @staticmethod
    def forward(ctx: Any, x: ShardedBatch) -> Tensor:
        return joined_values(x).detach()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return joined_values(tangent) if isinstance(tangent, ShardedBatch) else tangent


def _deepcopied(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    x, memo = args
    if id(x) in memo:
        known: Tensor = memo[id(x)]
        return known
    with without_torch_function():
        if not x.is_leaf:
            copied = copy.deepcopy(join(x), memo)  # torch's error
        else:
            copied = x.detach().clone().requires_grad_(x.requires_grad)
            copied.grad = copy.deepcopy(x.grad, memo)
    memo[id(x)] = copied
    return copied


def _set_data(func: Any, args: Args, kwargs: Kwargs) -> None:
    """``x.data = values``."""
    x, value = args
    if not isinstance(x, ShardedBatch):
        func(x, join(value))
    elif value.shape != x.shape or value.dtype != x.dtype or value.device != x.device:
        raise GatherError(
            f"ShardedBatch: data set must have shape {tuple(x.shape)}, dtype {x.dtype} and device {x.device}, "
            f"got {tuple(value.shape)}, {value.dtype} and {value.device}. Call everygpu.gather(x) first."
        )
    else:
        x._memory = Memory()
        x._memory.is_joined = True
        joined = (join(value) if isinstance(value, ShardedBatch) else value).detach()
        x._kept = JoinedValues(layout=x._layout, is_inference=x.is_inference(), make=joined.detach, tensor=joined)


def _backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``loss.backward()``: refuse one loss per replica, whose combination into one number is unknown."""
    gradient = args[1] if len(args) > 1 else kwargs.get("gradient")
    if gradient is None:
        _refuse_one_each(args[0], "backward", "{}.backward()")
    return _call(func, args, kwargs)


def _as_number(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``loss.item()``, ``float(loss)``, ``int(loss)``."""
    name = func.__name__.strip("_")
    _refuse_one_each(args[0], name, "{}.item()" if name == "item" else f"{name}({{}})")
    return _call(func, args, kwargs)


def _refuse_one_each(x: ShardedBatch, name: str, call: str) -> None:
    if x.shard_rows is not None and x.numel() != 1:
        raise LossError(
            f"{name}: the loss must be one number, got one entry from each of {x.numel()} replicas. Call "
            f"{call.format('loss.mean()')} if it is a mean: over rows, over labels that aren't -100, or over what "
            f"DataParallel(weight=...) counts; {call.format('loss.sum()')} if it is a sum."
        )


def _reshaped_in_place(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """``t_`` and others: the batch becomes a view of the tensor that it was, which earlier views are of, too.

    torch's own in-place operations give earlier views wrong gradients: it replays them on a batch of the new shape.

    Source:
        ``torch.utils.swap_tensors``, which refuses tensors that have views.
    """
    x: Tensor = args[0]
    with without_torch_function():
        is_fixed = x.requires_grad and (x.is_leaf or x.retains_grad or not torch.is_grad_enabled())
        if is_fixed or are_transforms_active():
            torch_result: Tensor = func(*args, **kwargs)
            return torch_result
        view = getattr(Tensor, func.__name__.removesuffix("_"))(*args, **kwargs)
        x.__class__, view.__class__ = view.__class__, x.__class__
        was = dict(x.__dict__)
        if not isinstance(x, ShardedBatch):  # plain now: its parts are the batch's that it is a view of
            for name in ShardedBatch.__annotations__:
                x.__dict__.pop(name, None)
        x.__dict__.update(view.__dict__)  # attributes that were set on it stay
        view.__dict__.update(was)
        swap_tensors(x, view)
    return x


def _with_all_arguments(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a function with an argument that torch doesn't hand over; the frame of torch's own function has it."""
    frame, name = inspect.currentframe(), _LOST_ARGUMENTS[func]
    while frame is not None and frame.f_code is not func.__code__:
        frame = frame.f_back
    lost = {name: frame.f_locals[name]} if frame is not None and name in frame.f_locals else {}
    return ROW_REDUCTIONS.get(func, _call)(func, args, {**kwargs, **lost})


_LOST_ARGUMENTS: dict[Any, str] = {
    F.l1_loss: "weight",
    torch.chain_matmul: "out",
    Tensor.dim_order: "ambiguity_check",
}


def _members(names: str) -> list[Any]:
    return [getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name)]


FUNCTIONS: dict[Any, Rule] = {
    **dict.fromkeys(
        _members("numpy __array__ __dlpack__ share_memory_ apply_ map_ map2_ __reduce_ex__"),
        _on_joined,
    ),
    **dict.fromkeys(
        _members("data_ptr const_data_ptr mutable_data_ptr untyped_storage storage _typed_storage is_shared"),
        _on_memory,
    ),
    torch.linalg.matrix_rank: _on_joined,  # as for any subclass, torch doesn't write ``out``
    Tensor.__cuda_array_interface__.__get__: _on_joined,
    **dict.fromkeys(_members("t_ transpose_ unsqueeze_ squeeze_ swapaxes_ swapdims_ as_strided_"), _reshaped_in_place),
    Tensor.tolist: _on_values,
    Tensor.__repr__: _formatted,
    Tensor.__format__: _formatted,
    Tensor.__deepcopy__: _deepcopied,
    Tensor.backward: _backward,
    **dict.fromkeys(_members("item __float__ __int__"), _as_number),
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **ROW_REDUCTIONS,
    **dict.fromkeys(_LOST_ARGUMENTS, _with_all_arguments),
}
"""Replacements of functions, by function."""
