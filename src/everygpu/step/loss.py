"""A step's arguments, the loss among what model and loss return, and how much each batch counts in an update."""

import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from everygpu import comm, tree
from everygpu.errors import CallError, LossError
from everygpu.parallel.cuda_graphs.guards import values_of
from everygpu.parallel.cuda_graphs.static_batch import Batch
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.scatter.batch_types import move_tree, open_known
from everygpu.parallel.scatter.batch_weight import Weight, weight_batch
from everygpu.parallel.scatter.denominator import LabelCheck, denominator_of, note_denominator
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


def check_call(module: nn.Module, batch: Batch, error: TypeError) -> None:
    """Say how a step is called where its only argument is a tuple that the model's forward doesn't take."""
    try:
        inspect.signature(module.forward).bind(*batch[0], **batch[1])
    except TypeError:
        raise CallError(
            f"TrainStep: a tuple holds the model's arguments, and {type(module).__name__}.forward doesn't take "
            f"{len(batch[0])}. Write step(x, y) for a batch (x, y)."
        ) from error


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
        if others := [path for path, x in tree.leaves(output, "out") if x is not found and _is_like_loss(x, found)]:
            raise LossError(
                f"TrainStep: with loss=None the model must return one loss, got several numbers that take a gradient, "
                f"out[0] and {', '.join(others)}, and only the first would be trained. Return their sum first and "
                f"others detached, or pass what adds them up: TrainStep(model, lambda losses: sum(losses), ...)."
            )
    if found is None:
        raise LossError(
            f"TrainStep: with loss=None the model must return its loss as a tensor, under ['loss'] or as .loss, "
            f"got {type(output).__qualname__}. Pass a loss to TrainStep, or return it from forward."
        )
    return found


def _is_like_loss(x: Any, loss: Tensor) -> bool:
    """Whether another output is a number for all rows, as the loss is, that could be trained."""
    if not isinstance(x, Tensor) or not x.requires_grad or x.ndim != loss.ndim or x.ndim > 1:
        return False
    if isinstance(x, ShardedBatch) and isinstance(loss, ShardedBatch):
        return x.shard_rows is not None
    return x.numel() == 1


def as_number(loss: Any, *, is_models: bool = False) -> Tensor:
    """Return a loss as a tensor of shape (); several replicas' are weighted by their rows."""
    if not isinstance(loss, Tensor):
        raise LossError(f"TrainStep: the loss must be a tensor, got {type(loss).__qualname__}.")
    if isinstance(loss, ShardedBatch) and (loss.shard_rows is not None or (is_models and _is_one_each(loss))):
        mean, counted = loss.mean(), denominator_of(loss)  # of one number per replica
        if counted is not None and mean.grad_fn is not None:
            note_denominator(mean, counted)
        return mean
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
    """Whether each replica returned one number, of one row each: of more rows the batch knows it itself."""
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
    """Whether the backward that is running was called for a leaf's gradient, not to add it to ``.grad``."""
    try:
        will_execute(get_gradient_edge(leaf).node)
    except RuntimeError:  # "A leaf node was passed … but we are currently running autograd.grad()"
        return True
    return False


class BatchWeights:
    """Makes an update's gradient the mean over all rows of its batches, not a mean of their means."""

    def __init__(self, weight: Weight | None, model: DataParallel, loss: Any) -> None:
        self._group = None if model.rank_model is None else model.rank_model.group
        self._home = model.replica_devices[0]
        self._weight, self._loss = weight, loss
        self._dim, self._num_devices = model.dim, len(model.device_ids)
        self._check = LabelCheck("TrainStep")
        self._accumulate = 1
        self._is_needed = False
        self._unit: float | None = None  # gradients stay in the range that they have with one batch
        wide = torch.float64 if any(p.dtype is torch.float64 for p in model.parameters()) else torch.float32
        self._share = torch.ones((), dtype=wide, device=self._home)
        self._written = 1.0
        self._is_seen = False
        """Whether it is known only after forward what batches count, and then on the device."""
        self._here: float | Tensor = 1.0
        self._all: float | Tensor = 1.0
        self._total: float | Tensor = 0.0

    def begin(self, batch: Batch, accumulate: int) -> None:
        """Count a batch of an update of so many; a capture finds the share where the one before was."""
        self._accumulate = accumulate
        self._is_needed = accumulate > 1 or self._group is not None
        if not self._is_needed:
            return
        if self._group is not None:
            self._group.first_batch.compare(self._group, batch)
        self._here = self._count(batch)
        if self._unit is not None:
            self._write(self._here)

    def see(self, batch: Batch, loss: Tensor) -> None:
        """Count the batch by its loss, where that says more: torch may have computed it as a mean over labels."""
        if not self._is_needed:
            return
        here, is_known = self._here, self._weight is not None or isinstance(self._here, Tensor)
        seen = None if is_known else denominator_of(loss)
        if seen is not None:
            here, self._is_seen = seen.to(self._home, self._share.dtype), True
        elif not is_known and self._check.is_due():
            self._check.look([batch], [[loss]])()
        if not torch.is_grad_enabled():  # an evaluation
            return
        is_first = self._unit is None
        if is_first:
            self._unit = self._find_unit(here)
        if is_first or seen is not None:  # else a capture would keep the number
            self._write(here)

    def _write(self, here: float | Tensor) -> None:
        share = here / (self._unit or 1.0)
        if isinstance(share, Tensor):
            self._share.copy_(share)
            self._written = float("nan")
        elif share != self._written or self._is_seen:  # a replay may have written since
            self._share.fill_(share)
            self._written = share

    @property
    def _counted(self) -> float | Tensor:
        """How much the batch counts, once its forward was run or replayed."""
        return self._share * (self._unit or 1.0) if self._is_seen else self._here

    def seed(self, loss: Tensor) -> Tensor:
        """Return the loss's own gradient, with which backward begins; 0 for a batch without rows, whose mean is nan."""
        if not self._is_needed:
            return torch.ones_like(loss)
        return comm.copy(self._share, loss.device) / self._accumulate  # hooks may write to it

    def end(self) -> None:
        """Count the batch as one of the update."""
        self._total = self._total + self._all

    def mean(self, loss: Tensor, flags: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the loss over all ranks' rows of the batch that was begun, and the sum of the flags sent with it."""
        self._all = here = self._counted
        if self._group is None:
            return loss, flags
        dtype = torch.promote_types(loss.dtype, torch.float32)
        if isinstance(here, Tensor):
            numbers = here.to(loss.device, dtype).repeat(2)
        else:  # no copy from the host, which waits for what is queued there
            numbers = torch.full((2,), here, dtype=dtype, device=loss.device)
        found = loss.detach()
        if isinstance(here, Tensor) or here == 0:  # a mean over no rows is nan
            found = torch.where(numbers[1] == 0, 0, found)
        numbers[0].mul_(found)
        numbers = numbers if flags is None else torch.cat([numbers, flags.to(dtype)])
        self._group.all_reduce(numbers)()
        self._all = numbers[1].to(self._home, self._share.dtype)
        return (numbers[0] / numbers[1]).to(loss.dtype), None if flags is None else numbers[2:]

    def leave_out_empty(self, loss: Tensor, *, of_all_ranks: bool = False) -> Tensor:
        """Return what must be finite of a loss, this process's or all ranks': 0 where nothing counts, its mean nan."""
        if not self._is_needed:
            return loss
        share = self._all if of_all_ranks else self._share
        if isinstance(share, Tensor):
            return torch.where(comm.copy(share, loss.device) == 0, 0, loss)
        return loss if share else torch.zeros_like(loss)

    def take_factor(self) -> float | Tensor:
        """Return what the sum of the batches' gradients is multiplied by, and begin with the next update."""
        total, self._total = self._total, 0.0
        if not self._is_needed or self._unit is None:
            return 1.0
        if isinstance(total, float) and total == 0:  # batches without rows only, whose mean is nan
            return float("nan")
        return self._accumulate * self._unit / total

    def drop(self) -> None:
        """Forget the batches of this update."""
        self._total = 0.0

    def _count(self, batch: Batch) -> float | Tensor:
        found = weight_batch(
            self._weight, "TrainStep", *batch, loss=self._loss, dim=self._dim, num_devices=self._num_devices
        )
        return found.to(self._home, self._share.dtype) if isinstance(found, Tensor) else found

    def _find_unit(self, here: float | Tensor) -> float:
        found = max(float(here), 1.0)
        return found if self._group is None else self._group.broadcast_object(found)
