"""Functions of a ``ShardedBatch`` that don't come down to torch's operations: memory, printing, copies, the mean."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from everygpu.errors import GatherError, LossError
from everygpu.parallel.sharded.batch import Args, Kwargs, ShardedBatch, join, whole
from everygpu.parallel.sharded.layout import Joined, Memory
from everygpu.parallel.sharded.row_reductions import TOTALS
from everygpu.torch_private.autograd import are_transforms_active
from everygpu.torch_private.compiler import is_scripted
from everygpu.torch_private.modes import without_torch_function
from everygpu.torch_private.pytree import tree_map_only
from everygpu.torch_private.tensors import swap_tensors

Function = Callable[[Any, Args, Kwargs], Any]


def function_for(func: Any) -> Function:
    """Return what to call in place of a function: most often, what calls the function itself."""
    if is_scripted(func):
        return _on_joined  # its fused kernels take pointers
    return FUNCTIONS.get(func, _itself)


def _itself(func: Any, args: Args, kwargs: Kwargs) -> Any:
    with without_torch_function():
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not any(text in str(error) for text in _NO_DATA):
                raise
        joined = tree_map_only(ShardedBatch, join, (args, kwargs))
        return func(*joined[0], **joined[1])


_NO_DATA = ("data is not allocated yet", "Cannot access data pointer", "invalid python storage")
"""What torch says when C++ code asks for a pointer, as for the lengths in ``ctc_loss``."""


def _on_joined(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Ask the joined tensor, whose memory may be written through the answer."""
    x = next((a for a in args if isinstance(a, ShardedBatch)), None)
    joined = [join(a) if isinstance(a, ShardedBatch) else a for a in args]
    result = func(*joined, **{k: join(v) if isinstance(v, ShardedBatch) else v for k, v in kwargs.items()})
    return x if any(result is j for j in joined) else result


def _reading(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Ask for a plain copy of the values, which nobody writes."""
    return func(whole(args[0]), *args[1:], **kwargs)


def _printed(func: Any, args: Args, kwargs: Kwargs) -> str:
    with without_torch_function():
        return str(func(Gathered.apply(args[0]), *args[1:], **kwargs))  # type: ignore[no-untyped-call]


class Gathered(torch.autograd.Function):
    """The joined values, known to be only looked at."""

    @staticmethod
    def forward(ctx: Any, x: ShardedBatch) -> Tensor:
        return whole(x).detach()


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
        x._joined = Joined(
            memory=x._memory, layout=x._layout, is_inference=x.is_inference(), make=joined.detach, tensor=joined
        )


def _backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``loss.backward()``: of one loss per replica there is no gradient until it is known how they make one."""
    x, gradient = args[0], args[1] if len(args) > 1 else kwargs.get("gradient")
    if gradient is None and x.shard_rows is not None and x.numel() != 1:
        raise LossError(
            f"backward: the loss must be one number, got one entry from each of {x.numel()} replicas. Call "
            f"loss.mean().backward(), which weighs them by rows and so is the loss of the whole batch, or "
            f"loss.sum().backward() if the loss is a sum over rows."
        )
    return _itself(func, args, kwargs)


def _turned(func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """``t_`` and others: the batch becomes the view of what it was, which views taken before are of, too.

    torch's own way gives such views wrong gradients: it takes them again, of a batch that has another shape by then.

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
        x.__dict__.update(view.__dict__)  # whatever else was set on it stays
        view.__dict__.update(was)
        swap_tensors(x, view)
    return x


def _members(names: str) -> list[Any]:
    return [getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name)]


FUNCTIONS: dict[Any, Function] = {
    **dict.fromkeys(
        _members(
            "numpy data_ptr untyped_storage storage _typed_storage __array__ __dlpack__ share_memory_ is_shared "
            "apply_ map_ map2_ __reduce_ex__ const_data_ptr mutable_data_ptr"
        ),
        _on_joined,
    ),
    Tensor.__cuda_array_interface__.__get__: _on_joined,
    **dict.fromkeys(_members("t_ transpose_ unsqueeze_ squeeze_ swapaxes_ swapdims_ as_strided_"), _turned),
    Tensor.tolist: _reading,
    Tensor.__repr__: _printed,
    Tensor.__format__: _printed,
    Tensor.__deepcopy__: _deepcopied,
    Tensor.backward: _backward,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **TOTALS,
}
"""What is called in place of a function given a batch."""
