"""Which outputs, with which autograd graph, a recorded forward can return anew at each launch."""

import functools
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from everygpu import tree
from everygpu.errors import CaptureError
from everygpu.parallel.cuda_graphs.launch import Leaves, Opaque
from everygpu.parallel.cuda_graphs.static_batch import PLAIN_TYPES
from everygpu.parallel.replicas.module_tree import is_dense

_ACCUMULATION = "torch::autograd::AccumulateGrad"


def find_unsupported_tensor(module: nn.Module) -> str | None:
    """Name a parameter or buffer that can't be part of a recording."""
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if not is_dense(t):
            return f"{name} is no plain dense tensor"
    return None


def seal_outputs(outputs: list[Any]) -> list[Any]:
    """Return outputs of which a launch can make others: in place of objects with tensors in them, ``Opaque``s.

    Raises:
        CaptureError: one can't be made anew.
    """
    sealed: list[Any] = tree.map_leaves(_seal, outputs)
    return sealed


def _seal(x: Any) -> Any:
    if (type(x) is Tensor and x.layout == torch.strided) or type(x) in PLAIN_TYPES:
        return x
    try:
        if isinstance(x, Tensor):
            raise TypeError(f"of layout {x.layout}")
        return Opaque(x)
    except Exception as error:
        raise CaptureError(
            f"DataParallel: outputs must be dense tensors, numbers or strings, or objects of these to be recorded, got "
            f"a {type(x).__name__} ({error}). Pass engine='threads'."
        ) from error


def check_graph(outputs: list[Tensor], params: list[Tensor], leaves: Leaves, module: nn.Module) -> None:
    """Refuse an autograd graph that reaches a parameter in whose place leaves were to be used, another tensor whose
    gradient a launch would lose, a reentrant checkpoint or a sparse gradient.
    """
    originals = set(map(id, params))
    known = {id(t) for rows in leaves for row in rows for t in row}
    for node in _nodes(outputs):
        if node.name() == _ACCUMULATION:
            _check_leaf(node, originals, known, module)
        if node.name() == "CheckpointFunctionBackward":
            raise CaptureError(
                "DataParallel: activation checkpoints must be non-reentrant, got a reentrant one. "
                "Call torch.utils.checkpoint.checkpoint with use_reentrant=False."
            )
        if getattr(node, "_saved_sparse", False):
            raise CaptureError(
                "DataParallel: gradients must be dense, got an embedding with sparse=True. Pass sparse=False."
            )


def _check_leaf(node: Any, originals: Collection[int], known: Collection[int], module: nn.Module) -> None:
    # More than of a leaf that only its graph refers to, as one that forward makes to differentiate by: no code can read
    # the gradient of that.
    is_held = _num_references(node) > _num_references(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
    leaf = node.variable
    if id(leaf) in originals:
        raise CaptureError(
            "DataParallel: every parameter in forward must be a registered one, got one from a plain attribute "
            "of a module. Register it with register_parameter."
        )
    if is_held and id(leaf) not in known:
        name = next((f"buffer {name}" for name, b in module.named_buffers() if b is leaf), "another")
        raise CaptureError(
            f"DataParallel: what requires a gradient in forward must be a parameter of the module, got "
            f"{name} of shape {tuple(leaf.shape)}, whose gradient a recording would lose. Register it in the module as "
            f"an nn.Parameter, or as a part of an nn.Module"
        )


def _num_references(node: Any) -> int:
    """Count what refers to a leaf: how many references are torch's own depends on its version."""
    return sys.getrefcount(node.variable)


def find_watched(outputs: list[Tensor], written: list[Tensor]) -> list[Tensor]:
    """Find which tensors, that Python may write, the graph behind outputs has saved for its backward."""
    saved = {t.untyped_storage().data_ptr() for node in _nodes(outputs) for t in _saved_by(node)}
    return [t for t in written if not t.is_inference() and t.untyped_storage().data_ptr() in saved]


def _saved_by(node: Node) -> Iterator[Tensor]:
    for name in _names_of_saved(type(node)):
        try:
            found = getattr(node, name)
        except (RuntimeError, AttributeError):  # freed
            continue
        for saved in found if isinstance(found, (tuple, list)) else [found]:
            yield from (t for t in _value_of(saved) if is_dense(t))


def _value_of(saved: Any) -> list[Tensor]:
    """Return what a node has saved, without unpacking it: checkpoints would run their part of forward again."""
    found: list[Tensor] = []

    def take(t: Tensor) -> Tensor:
        found.append(t)
        return t

    # Refused where something is packed already, such as by a checkpoint, and where nothing was saved.
    with suppress(RuntimeError):
        saved.register_hooks(take, lambda t: t)
    return found


@functools.cache
def _names_of_saved(kind: type[Node]) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def _nodes(outputs: list[Tensor]) -> set[Node]:
    """Collect the graph that tensors are connected to."""
    found: set[Node] = set()
    left = [get_gradient_edge(t).node for t in outputs if t.requires_grad]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [n for n, _ in node.next_functions if n is not None]
    return found
