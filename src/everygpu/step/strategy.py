"""Where a step's gradients are, and what applies them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from everygpu.parallel.buckets import replica_bucket_bytes
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.fully_sharded.shards import is_shard, local_part, replicated
from everygpu.parallel.reducer import Reducer, SummedGrads
from everygpu.ranks.group import Group
from everygpu.step.shards import all_params
from everygpu.step.update import Shares, multiply, prefer_fused, step_unless, total_norm

if TYPE_CHECKING:
    from everygpu.step.step_forward import StepForward


class UpdateStrategy(ABC):
    """What a ``TrainStep`` leaves to the kind of its optimizer, in the order of a step."""

    is_spread = False
    """Whether each device has a share."""
    asks_ranks = False
    """Whether ``norm`` is of gradients on several ranks, which all ask for it."""
    captured_forward: "StepForward | None" = None
    """What captures the model alone, where whole steps can't be."""

    def __init__(self, model: DataParallel) -> None:
        self._model = model
        self._group = None if model.rank_model is None else model.rank_model.group
        self._is_added_up = False

    def settle(self) -> "UpdateStrategy":
        """Before each update: return what to continue with."""
        return self

    def prepare(self) -> None:
        """Note what has changed since the last step."""
        return

    @abstractmethod
    def begin(self) -> None:
        """Start with no gradients."""

    def attach_grads(self) -> None:
        """Have backward leave gradients where ``reduce`` finds them."""
        return

    def detach_grads(self) -> None:
        """Leave the parameters without those that are no whole gradients of theirs."""
        return

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model on all devices."""
        ranks = self._model.rank_model  # another one after a release
        # The step itself weights ranks' losses.
        with nullcontext() if ranks is None else ranks.apart(self._model.module):
            return self._model(*inputs, **kwargs)

    def leaves(self) -> list[Tensor]:
        """List the parameters of which each replica has a leaf of its own."""
        return []

    @contextmanager
    def adding_up(self, loss: Tensor, *, is_only: bool) -> Iterator[None]:
        """All-reduce the gradients of a backward from ``loss`` while it runs, where no other is in its update."""
        self._is_added_up = False
        paused = nullcontext() if self._group is None else Reducer.of(self._group).paused()
        with paused, self._adding_up(loss) if is_only else nullcontext():
            yield

    def _adding_up(self, loss: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def flags(self) -> Tensor | None:
        """Return, under ranks, 1 for each parameter that has got a gradient; None if the gradients show it."""
        return None

    def take_flags(self, flags: Tensor | None) -> None:
        """Note the sum of all ranks' flags."""
        return

    @abstractmethod
    def reduce(self) -> Shares:
        """Add the gradients of all replicas up, and return each device's part."""

    def fold(self) -> None:
        """Add up the gradients of one of several batches of an update, where sums are by a tree."""
        return

    def norm(self, shares: Shares) -> Tensor:
        """Return the norm of all gradients as one vector, shape ()."""
        return total_norm(shares, self._model.replica_devices[0])

    @abstractmethod
    def apply(self, found_inf: Tensor | None) -> None:
        """Step the optimizer; not at all where ``found_inf``, of shape () on the first device, is 1 and not 0."""

    def refresh(self) -> None:
        """Send the parameters to every device."""
        return

    def copies(self) -> dict[int, list[Tensor]]:
        """Return each parameter, by its ``id``, and the copies of it that devices keep from step to step."""
        return {}

    def forget_captures(self) -> bool:
        """Drop captures of the model, with their memory; return whether there were any."""
        return self.captured_forward is not None and self.captured_forward.capture.forget()


class StockUpdate(UpdateStrategy):
    """A stock optimizer steps on the parameters' own gradients, on the primary device, as in a plain loop.

    Over ranks gradients are added up beside backward.
    """

    def __init__(self, model: DataParallel, optimizer: Optimizer) -> None:
        super().__init__(model)
        self._optimizer = optimizer
        self._sums: SummedGrads | None = None
        prefer_fused(optimizer)

    def begin(self) -> None:
        self._optimizer.zero_grad()

    @contextmanager
    def _adding_up(self, loss: Tensor) -> Iterator[None]:
        sums = self._current_sums()
        self._is_added_up = sums is not None
        with nullcontext() if sums is None else sums.adding_up(loss):
            yield

    def reduce(self) -> Shares:
        if not self._is_added_up and (sums := self._current_sums()) is not None:
            sums.add_up()
        self._is_added_up = False
        grads = [p.grad for p in all_params(self._optimizer) if p.grad is not None]
        return [grads] if grads else []

    def apply(self, found_inf: Tensor | None) -> None:
        step_unless(found_inf, self._optimizer, [p for p in all_params(self._optimizer) if p.grad is not None])

    def _current_sums(self) -> SummedGrads | None:
        """Return what sums the parameters' own gradients over ranks."""
        if self._group is None:
            return None
        if self._sums is None:
            self._sums = SummedGrads(self._group, replica_bucket_bytes(self._model.bucket_cap_mb))
        self._sums.follow([p for p in all_params(self._optimizer) if p.requires_grad])
        return self._sums


class FullyShardedUpdate(StockUpdate):
    """Takes the gradients that FSDP2 has averaged over ranks, each rank its own rows of them.

    Args:
        model: Shared out.
        group: Its ranks.
        optimizer: A stock one, of its parameters.
    """

    asks_ranks = True

    def __init__(self, model: DataParallel, group: Group, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self._ranks, self._group = group, None  # no sum over ranks

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model in its own precision; the loss alone is computed under autocast."""
        with torch.autocast(self._model.replica_devices[0].type, enabled=False):
            return super().forward(*inputs, **kwargs)

    def reduce(self) -> Shares:
        """Return this rank's rows of the sum of all ranks' gradients."""
        parts = [local_part(p.grad) for p in all_params(self._optimizer) if p.grad is not None]
        grads = [part for part in parts if part.numel()]
        shares = [grads] if grads else []
        multiply(shares, float(self._ranks.size))  # FSDP2 has divided by it
        return shares

    def norm(self, shares: Shares) -> Tensor:
        """Return the norm of all ranks' gradients as one vector, shape ()."""
        squared = total_norm(shares, self._model.replica_devices[0]).square()
        self._ranks.all_reduce(squared)()
        return squared.sqrt()

    def apply(self, found_inf: Tensor | None) -> None:
        """Step the optimizer; not where ``found_inf``, of shape () and the same on all ranks, isn't 0."""
        updated = [p for p in all_params(self._optimizer) if p.grad is not None]
        like = next((p for p in updated if is_shard(p)), None)
        if found_inf is not None and like is not None:
            found_inf = replicated(found_inf, like)
        step_unless(found_inf, self._optimizer, updated)
