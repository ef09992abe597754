"""Whether the state of an optimizer or a scheduler is that of another class, which torch itself would load."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everygpu.errors import CheckpointMismatchError

_INNER = ("module", "optimizer", "_optimizer", "optim")
"""Attributes under which optimizers that wrap another one have it: ours, Accelerate's, Lightning's, torch's ZeRO."""
_OPTIONAL = frozenset(
    {
        *("params", "param_names", "name", "initial_lr"),
        *("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
        *("optimizer", "verbose", "_step_count", "_is_initial", "_last_lr", "_get_lr_called_within_step"),
    }
)
"""Keys that some versions of torch have, or schedulers and callers add."""


def class_name(value: object) -> str | None:
    """Name an optimizer's or a scheduler's class, by which its state is known; None for any other object.

    A wrapper counts as the optimizer inside, a subclass of one of torch's classes as that class.
    """
    while isinstance(value, Optimizer) and (inner := _inner(value)) is not None:
        value = inner
    if not isinstance(value, Optimizer | LRScheduler):
        return None
    kinds = [
        kind
        for kind in type(value).__mro__
        if kind.__module__.startswith("torch.optim.")
        and kind not in (Optimizer, LRScheduler)
        and not kind.__name__.startswith("_")
    ]
    kind = kinds[0] if kinds else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def check_class(target: object, name: str, saved: str | None, state: Any) -> None:
    """Refuse the state of another class, or, where the file names none, one with other settings in place of its own."""
    own = class_name(target)
    if own is None:
        return
    # A class may have moved to another module since.
    if saved is not None and _last(saved) != _last(own):
        raise CheckpointMismatchError(
            f"load: {name} is of {own}, and the saved state of {saved}. Nothing was loaded; make one of that class, "
            f"or leave {name} out."
        )
    if saved != own and isinstance(state, Mapping):
        _check_settings(target, name, own, state)


def _check_settings(target: Any, name: str, own: str, state: Mapping[str, Any]) -> None:
    if isinstance(target, Optimizer):
        wanted = set(target.defaults)
        known = wanted.union(*target.param_groups)
        found = set().union(*state["param_groups"])
    else:
        wanted = known = set(target.state_dict())
        found = set(state)
    missing, unknown = sorted(wanted - found - _OPTIONAL), sorted(found - known - _OPTIONAL)
    if missing and unknown:
        raise CheckpointMismatchError(
            f"load: {name} is of {own}, and the saved state of another class: it has {', '.join(unknown)}, where "
            f"{own} has {', '.join(missing)}. Nothing was loaded; make one of that class, or leave {name} out."
        )


def _inner(wrapper: Optimizer) -> Optimizer | None:
    found = (getattr(wrapper, name, None) for name in _INNER)
    return next((inner for inner in found if isinstance(inner, Optimizer) and inner is not wrapper), None)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
