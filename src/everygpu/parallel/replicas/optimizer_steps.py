"""Steps of other code's optimizers, whose fused kernels write where torch counts no write."""

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class OptimizerSteps:
    """Whether any torch optimizer has stepped one of some parameters, however it was called; for as long as this lives.

    Noted before a step, which may be interrupted, and after it, as its closure may do anything.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.have_come = False
        self._params = {id(p): p for p in params}
        living = _watched()
        living.add(weakref.ref(self, living.discard))

    def are_awaited(self) -> bool:
        """Whether parameters are waiting for a step."""
        return bool(self._params) and not self.have_come

    def note(self, params: set[int]) -> None:
        """Note a step of some parameters, by ``id``."""
        self.have_come = self.have_come or not params.isdisjoint(self._params)


@functools.cache
def _watched() -> "set[weakref.ref[OptimizerSteps]]":
    """Register hooks that note steps of torch's optimizers; never removed, as removing during a call is an error."""
    living: set[weakref.ref[OptimizerSteps]] = set()

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = [ref() for ref in living.copy()]  # at once: others come and go in other threads
        awaited = [steps for steps in found if steps is not None and steps.are_awaited()]
        params = {id(p) for group in optimizer.param_groups if awaited for p in group["params"]}
        for steps in awaited:
            steps.note(params)

    register_optimizer_step_pre_hook(note)
    register_optimizer_step_post_hook(note)
    return living
