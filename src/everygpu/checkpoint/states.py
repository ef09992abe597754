"""Take the state of a module, optimizer, scheduler, generator or plain value, and put it back.

Putting back is planned first and done later: planning checks everything that can be checked and changes
nothing, so that a load either changes all its targets or none.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from everygpu.checkpoint.keys import unwrap
from everygpu.checkpoint.modules import Fit, module_state, plan_module
from everygpu.checkpoint.trainers import check_class
from everygpu.errors import CheckpointContentError, CheckpointMismatchError

Kind: TypeAlias = Literal["module", "state_dict", "generator", "plain"]
"""How a value is saved: a module by names, an object by its state_dict, a torch.Generator, or as it is."""


def kind_of(value: object) -> Kind:
    """Tell how a value is saved and restored."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.Generator):
        return "generator"
    has_state = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return "state_dict" if has_state and not isinstance(value, type) else "plain"


def take_state(value: object) -> Any:
    """Return what is to be stored of a value; tensors in it are the value's own, not copies.

    Args:
        value: Of any kind. A module's names come without prefixes of wrappers.
    """
    kind = kind_of(value)
    if kind == "module":
        return module_state(unwrap(cast(nn.Module, value)))
    if kind == "generator":
        return cast(torch.Generator, value).get_state()
    return cast(Any, value).state_dict() if kind == "state_dict" else value


def require_kind(value: object, name: str, what: str, function: str, *kinds: Kind) -> None:
    """Refuse an argument that is nothing of the kind.

    Raises:
        CheckpointContentError: the value is of none of the kinds.
    """
    if kind_of(value) not in kinds:
        raise CheckpointContentError(
            f"{function}: {name} must be {what}, got {type(value).__qualname__}. Pass the object itself, not its state."
        )


def require_names(misplaced: tuple[object, ...], function: str, call: str) -> None:
    """Refuse what was passed without saying what it is.

    Raises:
        CheckpointContentError: there is something.
    """
    if misplaced:
        kind = type(misplaced[0]).__qualname__
        raise CheckpointContentError(f"{function}: parts must be passed by name, got {kind} without one. Write {call}.")


def plan_restore(
    target: object, name: str, kind: Kind, state: Any, fit: Fit, saved_class: str | None = None
) -> Callable[[], object]:
    """Check that a state fits its target, and return what puts it there.

    Args:
        target: The object to change later.
        name: What it is called in errors.
        kind: How it was saved.
        state: The saved state, as `take_state` returned it.
        fit: How exactly a module must be the one that was saved.
        saved_class: Of an optimizer or a scheduler, where the checkpoint names it.
    Returns:
        A call without arguments that changes the target.
    Raises:
        CheckpointMismatchError: the state belongs to something else.
    """
    if kind != kind_of(target):
        raise CheckpointMismatchError(
            f"load: {name} must be what was saved under that name, a {kind}, "
            f"got {type(target).__qualname__}. Leave it out to get the saved value back in load's result."
        )
    if kind == "module":
        return plan_module(unwrap(cast(nn.Module, target)), name, state, fit)
    if kind == "generator":
        return _plan_generator(cast(torch.Generator, target), name, state)
    _check_param_groups(target, name, state)
    check_class(target, name, saved_class, state)
    return lambda: cast(Any, target).load_state_dict(state)


def _plan_generator(target: torch.Generator, name: str, state: Any) -> Callable[[], object]:
    own = target.get_state()
    if not isinstance(state, Tensor) or state.shape != own.shape:
        raise CheckpointMismatchError(
            f"load: {name} must be a generator of the same type of device as the saved one, "
            f"got one on {target.device}. Make it there, or leave it out."
        )
    return lambda: target.set_state(state.cpu())


def _check_param_groups(target: object, name: str, state: Any) -> None:
    own = getattr(target, "param_groups", None)
    if own is None:
        return
    saved = state.get("param_groups") if isinstance(state, dict) else None
    sizes, own_sizes = _group_sizes(saved), _group_sizes(own)
    if sizes != own_sizes:
        raise CheckpointMismatchError(
            f"load: {name} must have the parameter groups that were saved, {sizes} parameters, "
            f"got {own_sizes}. Nothing was loaded; make the optimizer with the same parameters in the same order."
        )


def _group_sizes(groups: Any) -> list[int] | None:
    try:
        return [len(group["params"]) for group in groups]
    except (TypeError, LookupError):
        return None
