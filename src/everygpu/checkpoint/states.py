"""Take the state of a module, optimizer, scheduler, generator or plain value, and put it back.

Putting back is planned first and done later: planning checks everything that can be checked and changes
nothing, so that a load either changes all its targets or none.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from everygpu.checkpoint.keys import clean_names, describe_mismatch, match_names, name_cleaner, unwrap
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
        return _module_state(unwrap(cast(nn.Module, value)))
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


def plan_restore(target: object, name: str, kind: Kind, state: Any, strict: bool) -> Callable[[], object]:
    """Check that a state fits its target, and return what puts it there.

    Args:
        target: The object to change later.
        name: What it is called in errors.
        kind: How it was saved.
        state: What was saved, as `take_state` returned it.
        strict: Whether a module's names must be exactly those that were saved.
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
        return _plan_module(unwrap(cast(nn.Module, target)), name, state, strict)
    if kind == "generator":
        return _plan_generator(cast(torch.Generator, target), name, state)
    _check_param_groups(target, name, state)
    return lambda: cast(Any, target).load_state_dict(state)


def _module_state(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    names = clean_names(model, state)
    clean = name_cleaner(model)
    versions = getattr(state, "_metadata", {})
    return {
        "values": {names[name]: value for name, value in state.items()},
        # Modules read their own version from here to understand old states (BatchNorm, for one).
        "versions": {clean(f"{path}.").rstrip("."): dict(version) for path, version in versions.items()},
    }


def _plan_module(model: nn.Module, name: str, state: Any, strict: bool) -> Callable[[], object]:
    saved: dict[str, Any] = state["values"]
    own = model.state_dict()
    own_names = {clean: raw for raw, clean in clean_names(model, own).items()}
    pairs = {there: own_names[here] for there, here in match_names(saved, own_names).items()}
    _check_names(name, saved, own, pairs, strict)
    loaded = OrderedDict((pairs.get(there, there), value) for there, value in saved.items())
    # torch reads the versions from this attribute: Module.load_state_dict.
    loaded._metadata = _own_versions(model, own, state["versions"])  # type: ignore[attr-defined]
    return lambda: model.load_state_dict(loaded, strict=strict)


def _check_names(
    name: str, saved: Mapping[str, Any], own: Mapping[str, Any], pairs: Mapping[str, str], strict: bool
) -> None:
    missing = sorted(own.keys() - pairs.values()) if strict else []
    unexpected = sorted(saved.keys() - pairs.keys()) if strict else []
    differing = {there: _difference(saved[there], own[here]) for there, here in pairs.items()}
    shapes = {there: what for there, what in differing.items() if what is not None}
    if missing or unexpected or shapes:
        advice = " strict=False loads the names that both have." if not shapes else ""
        raise CheckpointMismatchError(
            f"load: the checkpoint must have the names and shapes of {name}, got "
            f"{len(missing)} missing, {len(unexpected)} unknown and {len(shapes)} of another shape. "
            f"Nothing was loaded.{advice}{describe_mismatch(missing, unexpected, shapes)}"
        )


def _difference(saved: object, own: object) -> str | None:
    if not isinstance(saved, Tensor) or not isinstance(own, Tensor) or nn.parameter.is_lazy(own):
        return None
    if saved.shape != own.shape:
        return f"{tuple(saved.shape)} in the checkpoint, {tuple(own.shape)} in the target"
    if saved.is_complex() and not own.is_complex():
        return f"{saved.dtype} in the checkpoint, {own.dtype} in the target"
    return None


def _own_versions(model: nn.Module, own: object, saved: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    clean = name_cleaner(model)
    paths = getattr(own, "_metadata", {})
    found = ((path, saved.get(clean(f"{path}.").rstrip("."))) for path in paths)
    return OrderedDict((path, dict(version)) for path, version in found if version is not None)


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
