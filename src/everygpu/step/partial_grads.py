"""Gradients that a loss asks for itself, which would be those of the first replica alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from everygpu import tree
from everygpu.errors import LossError
from everygpu.torch_private.autograd import will_execute


@contextmanager
def refusing_partial_grads(output: Any, leaves: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
    """Refuse ``torch.autograd.grad(…, parameters)`` within, for replicas that have leaf parameters of their own.

    Raises:
        LossError: a gradient with respect to a leaf was asked for.
    """

    def check(_: Any) -> None:
        if any(_is_asked_for(leaf) for leaf in leaves()):
            raise LossError(
                "TrainStep: a loss can't ask for gradients with respect to the model's parameters, as with "
                "torch.autograd.grad(…, parameters): each replica has its own. Use DataParallel in an ordinary loop."
            )

    tensors = [leaf for _, leaf in tree.leaves(output, "") if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    handles = [t.grad_fn.register_prehook(check) for t in tensors if t.grad_fn is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_asked_for(leaf: Tensor) -> bool:
    """Tell whether the backward that is running was called for a leaf's gradient, not to add it to ``.grad``."""
    try:
        will_execute(get_gradient_edge(leaf).node)
    except RuntimeError:  # "A leaf node was passed … but we are currently running autograd.grad()"
        return True
    return False
