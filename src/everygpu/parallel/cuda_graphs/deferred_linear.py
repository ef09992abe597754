"""A model's last linear layer, such as a language model's head, which its recording leaves out.

What a launch returns is the user's: it is copied out of the recording's memory, and its gradient is copied in. Logits
are larger than everything else, and both copies take as long as a block of the model. Left for after the launch, the
product writes to the user's memory itself, and goes backward from the gradient where it is. The recording then returns
what is multiplied, which is small.
"""

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu import tree
from everygpu.comm.streams import current_stream
from everygpu.keys import is_compiled
from everygpu.parallel import switches
from everygpu.parallel.compiler.dynamo import inputs_of, value_of
from everygpu.parallel.cuda_graphs.deferred_tensor import (
    DeferredTensor,
    DeferredTensorError,
    check_dropped,
    materialized,
)
from everygpu.torch_private.autograd import top_saved_tensor_hooks

LEAST_BYTES = 32 * 2**20
"""Smaller results are copied faster than they are deferred."""

_active: ContextVar["DeferredLinears | None"] = ContextVar("everygpu_deferred_linears", default=None)


class LinearCall:
    """``torch.nn.functional.linear`` of these. No dataclass: those are containers to everygpu.

    Args:
        operands: Inputs, weight, and bias if there is one.
    """

    def __init__(self, operands: Sequence[Tensor]) -> None:
        self.operands = list(operands)

    @property
    def device(self) -> torch.device:
        """Tell where it is computed."""
        return self.operands[0].device

    @staticmethod
    def run(operands: Sequence[Tensor]) -> Tensor:
        """Compute it of other operands."""
        return F.linear(*operands)


class DeferredLinears:
    """The linear layers of one recording that are computed after its launches.

    Each large one is deferred, and materialized when a function of torch's is given its result. Those that are still
    deferred when the replicas return them are left out of the recording.
    """

    def __init__(self) -> None:
        self._conditions: dict[torch.device, Hashable] = {}
        self._deferred: list[weakref.ref[DeferredLinear]] = []

    @property
    def were_any(self) -> bool:
        """Tell whether a product was deferred, for however long."""
        return bool(self._deferred)

    @contextmanager
    def watched(self, replicas: Sequence[nn.Module], *, are_compiled: bool = False) -> Iterator[None]:
        """Defer large linear layers that run within.

        Args:
            replicas: To be called with settings and streams as they are now.
            are_compiled: Their layers are compiled: a change would have them compiled anew, and what their graphs leave
                off calls ``linear`` itself.
        """
        self._conditions = {d: _conditions(d) for d in {p.device for m in replicas for p in m.parameters()}}
        is_as_ever = not are_compiled and _is_torchs_own()
        layers = [layer for replica in replicas for layer in _find_layers(replica)] if is_as_ever else []
        token = _active.set(self)
        with ExitStack() as stack:
            stack.callback(_active.reset, token)
            for m in layers:
                # Not a mode, which sees every function: parts of the model that are compiled would be compiled anew.
                m.__dict__["forward"] = partial(_run_layer, m)
                stack.callback(m.__dict__.pop, "forward", None)
            yield

    def defer(self, operands: Sequence[Tensor]) -> Tensor:
        """Return a deferred product, or the product itself where deferring it doesn't pay."""
        operands = [materialized(t) for t in operands]
        device = operands[0].device
        conditions = self._conditions.get(device)
        if conditions is None or conditions != _conditions(device) or not _pays(operands):
            return F.linear(*operands)
        deferred = DeferredLinear(LinearCall(operands), conditions)
        self._deferred.append(weakref.ref(deferred))
        return deferred

    def take(self, outputs: list[Any]) -> list[Any]:
        """Return what replicas have returned, with a ``LinearCall`` for each product that is still deferred."""
        return tree.map_leaves(_opened, outputs) if self.were_any else outputs

    def check(self) -> None:
        """Refuse a recording whose deferred products are still referenced; after ``take``.

        Raises:
            DeferredTensorError: a replica has put one in an attribute, say.
        """
        check_dropped(self._deferred)


def linear(*operands: Tensor) -> Tensor:
    """Compute ``torch.nn.functional.linear``, or defer it while a recording asks for that."""
    products = _active.get()
    return F.linear(*operands) if products is None else products.defer(operands)


class DeferredLinear(DeferredTensor):
    """The result of a linear layer that hasn't run yet."""

    _product: LinearCall
    _conditions: Hashable
    _versions: list[int]
    _result: Tensor | None

    @staticmethod
    def __new__(cls, product: LinearCall, conditions: Hashable) -> "DeferredLinear":
        x, weight, *_ = product.operands
        made: DeferredLinear = DeferredTensor.__new__(cls, (*x.shape[:-1], weight.shape[0]), x)
        made._product, made._conditions, made._result = product, conditions, None
        made._versions = [t._version for t in product.operands]
        return made

    def materialize(self) -> Tensor:
        """Return the product, as it would have been computed at once."""
        # Also if it is done: another stream may have waited for this one before it was.
        if self._conditions != _conditions(self._product.device):
            raise DeferredTensorError("a linear layer's result is used under other settings, or elsewhere")
        if self._result is None:
            _check_versions(self)
            self._result = LinearCall.run(self._product.operands)
        return self._result


def _opened(leaf: Any) -> Any:
    if type(leaf) is not DeferredLinear:
        return leaf
    if leaf._result is not None:
        return leaf._result
    _check_versions(leaf)
    # Backward begins at the operands, but not at a leaf: on the second GPU torch warns of streams there.
    return LinearCall([t.view_as(t) if t.is_leaf and t.requires_grad else t for t in leaf._product.operands])


def _check_versions(deferred: DeferredLinear) -> None:
    if [t._version for t in deferred._product.operands] != deferred._versions:
        raise DeferredTensorError("what goes into a linear layer is written in place afterwards")


def _run_layer(layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(*(t for t in (input, layer.weight, layer.bias) if t is not None))


def _is_torchs_own() -> bool:
    """Tell whether ``nn.Linear.forward`` is torch's own."""
    return getattr(nn.Linear.forward, "__globals__", None) is vars(sys.modules[nn.Linear.__module__])


def _find_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """Find torch's linear layers with their own forward, not within a compiled module."""
    if is_compiled(module):
        return
    if type(module) is nn.Linear and "forward" not in vars(module):
        yield module
    for child in module.children():
        yield from _find_layers(child)


def _conditions(device: torch.device) -> Hashable:
    """Return what a product depends on besides its operands, as far as a model may change it."""
    kind = device.type
    autocast = (torch.get_autocast_dtype(kind),) if torch.is_autocast_enabled(kind) else ()
    hooks = top_saved_tensor_hooks() is not None
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return modes, autocast, hooks, precision, current_stream(device)


def _pays(operands: Sequence[Tensor]) -> bool:
    """Tell whether a product is so large that copying its operands' gradients is less work than copying it."""
    x, weight, *_ = operands
    is_plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_inference() for t in operands)
    if not is_plain or not any(t.requires_grad for t in operands) or x.device != weight.device:
        return False
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return is_large(x.numel() // max(1, x.shape[-1]) * weight.shape[0] * dtype.itemsize, operands)


def is_large(num_bytes: int, operands: Sequence[Tensor]) -> bool:
    """Tell whether a product of so many bytes is worth leaving out."""
    return num_bytes >= max(LEAST_BYTES, sum(t.nbytes for t in operands))


def split_off(graph: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Take the last product off one of Dynamo's graphs, in place.

    Args:
        graph: A ``torch.fx.GraphModule``, whose parameters are inputs.
    Returns:
        What puts it behind the compiled rest again, by ``linear``; None where the graph ends in something else, or
        ``switches.DEFERS_LINEAR`` is off.
    """
    if not switches.is_on(switches.DEFERS_LINEAR):
        return None
    *nodes, output = graph.graph.nodes
    returned, last = list(output.args[0]), nodes[-1]
    if last.target is not F.linear or last.kwargs or returned.count(last) != 1 or any(map(_switches, nodes)):
        return None
    x, *others = [node for node in last.args if node is not None]
    values = [value_of(node) for node in (last, x, *others)]
    is_whole = x.op != "placeholder" and all(node.op == "placeholder" for node in others)
    is_static = all(isinstance(v, Tensor) and all(type(n) is int for n in v.shape) for v in values)
    if not is_whole or not is_static or not is_large(values[0].nbytes, values[1:]):
        return None
    inputs = inputs_of(graph)
    place, sources = returned.index(last), [inputs.index(node) for node in others]
    returned[place] = x
    output.args = (tuple(returned),)
    graph.graph.erase_node(last)
    graph.recompile()
    return partial(_put_behind, place=place, sources=sources)


def _switches(node: Any) -> bool:
    """Tell whether a node changes settings, for the rest of the graph."""
    return "grad_enabled" in str(node.target) or "autocast" in str(node.target)


def _put_behind(function: Callable[..., Any], *, place: int, sources: Sequence[int]) -> Callable[..., Any]:
    def run(*inputs: Any) -> list[Any]:
        outputs = list(function(*inputs))
        outputs[place] = linear(outputs[place], *(inputs[i] for i in sources))
        return outputs

    return run
