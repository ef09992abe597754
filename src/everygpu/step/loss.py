"""A step's arguments, the loss among what model and loss return, and gradients that a loss may not ask for."""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from everygpu import tree
from everygpu.errors import LossError
from everygpu.parallel.cuda_graphs.guards import values_of
from everygpu.parallel.cuda_graphs.static_batch import Batch
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.scatter.batch_types import move_tree, open_known
from everygpu.parallel.sharded.batch import ShardedBatch
from everygpu.torch_private.core import will_execute


def as_batch(inputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any], *, with_loss: bool) -> Batch:
    """Turn the arguments of a step into the model's, and what the loss takes after the output."""
    more, left = ((), targets) if with_loss else (targets, ())
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
        return (*inputs, *more), kwargs, left
    if isinstance(inputs, (dict, UserDict)) and not more:  # Hugging Face's collators return a UserDict
        return (), {**{str(k): v for k, v in inputs.items()}, **kwargs}, left
    return (inputs, *more), kwargs, left


def roots_of(model: DataParallel, loss: Any) -> list[nn.Module]:
    """List the modules that take part: the model, the loss, and those that the loss refers to."""
    found = [model.module, loss, *values_of(loss)]
    return list({id(m): m for m in found if isinstance(m, nn.Module)}.values())


def loss_in(output: Any) -> Any:
    """Find the loss in what a model returned."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):  # an attribute that is no item; what __getattr__ raises is its own affair
        found = output.get("loss", getattr(output, "__dict__", {}).get("loss"))
    else:
        found = getattr(output, "loss", None)
    if found is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        found = output[0]
    if found is None:
        raise LossError(
            f"TrainStep: with loss=None the model must return its loss as a tensor, under ['loss'] or as .loss, "
            f"got {type(output).__qualname__}. Pass a loss to TrainStep, or return it from forward."
        )
    return found


def as_number(loss: Any, *, is_models: bool = False) -> Tensor:
    """Return a loss as a tensor of shape (); several replicas' are weighed by their rows."""
    if not isinstance(loss, Tensor):
        raise LossError(f"TrainStep: the loss must be a tensor, got {type(loss).__qualname__}.")
    if isinstance(loss, ShardedBatch) and (loss.shard_rows is not None or (is_models and _is_one_each(loss))):
        return loss.mean()  # one number per replica, weighed by rows
    if loss.numel() != 1:
        first = "Return it first, or as {'loss': ...}; or take its mean." if is_models else None
        raise LossError(
            f"TrainStep: the loss must be one number, got shape {tuple(loss.shape)}. "
            f"{first or 'Take its mean, as with reduction=' + repr('mean') + '.'}"
        )
    return loss.reshape(())


def at_device(targets: tuple[Any, ...], device: torch.device) -> Any:
    """Put targets on a device, such as where the output is; what is spread over the devices already stays."""

    def move(leaf: Any) -> Any:
        return leaf if isinstance(leaf, ShardedBatch) else move_tree(leaf, device)

    return tree.map_leaves(move, targets, open_known)


def _is_one_each(loss: ShardedBatch) -> bool:
    """Tell whether each replica returned one number, of one row each: of more rows the batch knows it itself."""
    return all(shard.numel() == 1 for shard in loss.shards)


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
