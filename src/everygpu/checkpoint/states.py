"""Take the state of a module, optimizer, scheduler, generator or plain value, and put it back.

Putting back is planned first and done later: planning checks everything that can be checked and changes
nothing, so that a load either changes all its targets or none.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeAlias, cast

import numpy
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everygpu.checkpoint.by_ranks import has_shards, take_rows
from everygpu.checkpoint.format import MODEL, TRAINING, cut
from everygpu.checkpoint.modules import Fit, clean_names, module_state, plan_module, unwrap
from everygpu.checkpoint.parts import KNOWN, Contents, Kind, Part, find_state
from everygpu.checkpoint.values import Json, encode
from everygpu.errors import CheckpointContentError, CheckpointMismatchError
from everygpu.tree import map_leaves

Restore: TypeAlias = Callable[[], object]

_INNER = ("module", "optimizer", "_optimizer", "optim")
"""Attributes under which optimizers that wrap another one have it: ours, Accelerate's, Lightning's, torch's ZeRO."""
_BASES = ("Optimizer", "LRScheduler", "_LRScheduler")
_LATER = frozenset({"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"})
"""Settings of optimizers that some versions of torch lack."""
_BY_SHAPE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")
"""Of an optimizer's state: tensors of the parameter's shape."""


def kind_of(value: object) -> Kind:
    """Tell how a value is saved and restored."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.Generator):
        return "generator"
    has_state = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return "state_dict" if has_state and not isinstance(value, type) else "plain"


def check_parts(parts: Mapping[str, object], function: str) -> None:
    """Refuse a model, an optimizer or a scheduler that is nothing of the kind."""
    for name in parts.keys() & {*KNOWN}:
        kind, what = ("module", "a torch.nn.Module")
        if name != "model":
            kind, what = ("state_dict", "an object with state_dict and load_state_dict")
        if kind_of(parts[name]) != kind:
            raise CheckpointContentError(
                f"{function}: {name} must be {what}, got {type(parts[name]).__qualname__}. Pass the object itself, "
                f"not its state."
            )


def check_targets(targets: Mapping[str, object]) -> None:
    """Refuse what can't be restored in place."""
    check_parts(targets, "load")
    for name, target in targets.items():
        if kind_of(target) == "plain":
            raise CheckpointContentError(
                f"load: {name} must be an object to restore in place, got {type(target).__qualname__}. "
                f"Leave it out and read it from load's result."
            )


def encode_parts(parts: Mapping[str, object], tensors: Mapping[str, dict[str, Tensor]]) -> Json:
    """Turn the states of all parts into JSON, putting their tensors aside under `MODEL` and `TRAINING`."""
    names: dict[int, str] = {}
    for name, parameter in _parameters(parts).items():
        names.setdefault(id(parameter), name)
    encoded = {}
    for name, value in parts.items():
        kind, group = kind_of(value), tensors[MODEL if name == "model" else TRAINING]
        part: dict[str, Any] = {"kind": kind}
        if (known := class_name(value)) is not None:
            part["class"] = known
        groups = getattr(value, "param_groups", None)
        if kind == "state_dict" and isinstance(groups, list) and _group_sizes(groups) is not None:
            part["parameters"] = [[names.get(id(p)) for p in group["params"]] for group in groups]
        if kind == "module":  # a model's tensors are stored under the very names it has for them
            state, path = module_state(unwrap(cast(nn.Module, value))), "" if name == "model" else name
            part["state"] = {about: encode(entries, path, group) for about, entries in state.items()}
        else:
            of = cast(Any, value)
            state = of.get_state() if kind == "generator" else of.state_dict() if kind == "state_dict" else of
            part["state"] = encode(state, name, group)
        encoded[name] = part
    return encoded


def plan_parts(contents: Contents, targets: Mapping[str, Any], fit: Fit) -> list[Restore]:
    """Check that a checkpoint fits its targets; return what puts it into them, in this order."""
    modules = {name: target for name, target in targets.items() if kind_of(target) == "module"}
    restores: list[Restore] = []
    own_names: dict[str, str] = {}
    for name, target in modules.items():
        model, state = unwrap(target), _require_part(contents, name, target).state
        restore, pairs = plan_module(model, name, state, fit if name == "model" else Fit(strict=fit.strict))
        restores.append(restore)
        clean = clean_names(model, model.state_dict())
        own_names |= {_qualified(name, there): _qualified(name, clean[here]) for there, here in pairs.items()}
    parameters = _parameters(targets)
    named = {there: parameters[here] for there, here in own_names.items() if here in parameters}
    # What is checked least is restored first, the model last.
    rest = [name for name in targets if name not in modules]
    rest.sort(key=lambda name: name in KNOWN)
    planned = [_plan(name, targets[name], _require_part(contents, name, targets[name]), named) for name in rest]
    return planned + restores[::-1]


def detach(value: Any) -> Any:
    """Copy every tensor and array in a value, so that it outlives the file; what is one in it stays one."""
    copies: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor | numpy.ndarray):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone() if isinstance(leaf, Tensor) else leaf.copy()
        return copies[id(leaf)]

    return map_leaves(copy, value)


def class_name(value: object) -> str | None:
    """Name an optimizer's or a scheduler's class, by which its state is known; None for any other object.

    A wrapper counts as the optimizer inside, a subclass of one of torch's classes as that class.
    """
    if not isinstance(value, Optimizer | LRScheduler):
        return None
    found = (getattr(value, name, None) for name in _INNER if isinstance(value, Optimizer))
    inner = next((one for one in found if isinstance(one, Optimizer) and one is not value), None)
    if inner is not None:
        return class_name(inner)
    kinds = (k for k in type(value).__mro__ if k.__module__.startswith("torch.optim.") and k.__name__ not in _BASES)
    kind = next(kinds, type(value))
    return f"{kind.__module__}.{kind.__qualname__}"


def _require_part(contents: Contents, name: str, target: object) -> Part:
    """Return a part that is asked for, of the kind that its target takes; copied, except for modules' tensors."""
    place = contents.parts if name in KNOWN else contents.extras
    if name not in place:
        near = get_close_matches(name, place, n=1)
        hint = f"Did you mean {near[0]}?" if near else "Leave it out, or save it too."
        raise CheckpointMismatchError(f"load: The checkpoint has no part named {name}. Nothing was loaded. {hint}")
    part, kind = place[name], kind_of(target)
    if part.kind is None and kind == "module":
        part = find_state(part.state) or part
    elif part.kind is None and isinstance(part.state, Mapping | Tensor):
        part = replace(part, kind=kind)
    if part.kind != kind:
        raise CheckpointMismatchError(
            f"load: {name} was saved as a {part.kind or type(part.state).__qualname__}, which "
            f"{type(target).__qualname__} can't take. Leave it out to get the saved value back in load's result."
        )
    return part if kind == "module" or has_shards(target) else replace(part, state=detach(part.state))


def _plan(name: str, target: Any, part: Part, named: Mapping[str, Tensor]) -> Restore:
    state = part.state
    if isinstance(target, torch.Generator):
        if not isinstance(state, Tensor) or state.shape != target.get_state().shape:
            raise CheckpointMismatchError(
                f"load: {name} is a generator on {target.device}, and one of another type of device was saved. Make it "
                f"there, or leave it out."
            )
        return lambda: target.set_state(state)
    is_optimizer = getattr(target, "param_groups", None) is not None
    if is_optimizer:
        saved = state.get("param_groups") if isinstance(state, Mapping) else None
        if (sizes := _group_sizes(saved)) != (own_sizes := _group_sizes(target.param_groups)):
            raise CheckpointMismatchError(
                f"load: {name} was saved with parameter groups of {sizes} parameters, got {own_sizes}. Nothing was "
                f"loaded; make the optimizer with the same parameters."
            )
    _check_class(target, name, part.class_name, state)
    if is_optimizer:
        state = _in_own_order(target, name, part, named)
        _check_shapes(target, name, state)
        if has_shards(target):
            state = take_rows(target, state)
    return lambda: target.load_state_dict(state)


def _in_own_order(target: Any, name: str, part: Part, named: Mapping[str, Tensor]) -> Any:
    """Order the saved groups' parameters as the target's, by the names that the parameters have in the models."""
    saved = part.parameters
    if saved is None or any(known is None for group in saved for known in group):
        return part.state
    if not named:
        raise CheckpointMismatchError(
            f"load: {name}'s state is kept by the names of the model's parameters. Pass the model along: "
            f"load(path, model=model, {name}={name})."
        )
    groups = []
    for theirs, group, own in zip(saved, part.state["param_groups"], target.param_groups):
        ids = {id(named.get(str(known))): i for known, i in zip(theirs, group["params"])}
        order = [ids.get(id(p)) for p in own["params"]]
        is_one_state = isinstance(target, LBFGS)  # of all parameters together
        if None in order or (is_one_state and order != list(group["params"])):
            raise CheckpointMismatchError(
                f"load: {name} has other parameters, or in another order, than the saved group of "
                f"{cut(', '.join(map(str, theirs)))}. Nothing was loaded; make the optimizer with the same "
                f"parameters in each group."
            )
        groups.append({**group, "params": order})
    return {**part.state, "param_groups": groups}


def _check_class(target: Any, name: str, saved: str | None, state: Any) -> None:
    """Refuse the state of another class; where the file names none, of an optimizer with other settings."""
    own, what = class_name(target), None
    if own is not None and saved is not None:
        what = saved if saved.rpartition(".")[2] != own.rpartition(".")[2] else None  # it may be in another module now
    elif isinstance(target, Optimizer) and state["param_groups"]:
        lacking = sorted(target.defaults.keys() - state["param_groups"][0].keys() - _LATER)
        what = f"another class, without {', '.join(lacking)}" if lacking else None
    if what is not None:
        raise CheckpointMismatchError(
            f"load: {name} is of {own}, and the saved state of {what}. Nothing was loaded; make one of that class, or "
            f"leave {name} out."
        )


def _check_shapes(target: Any, name: str, state: Any) -> None:
    """Refuse moments that are of another parameter."""
    for group, own in zip(state["param_groups"], target.param_groups):
        for key, parameter in zip(group["params"], own["params"]):
            about = state.get("state", {}).get(key)
            for what in _BY_SHAPE if isinstance(about, Mapping) else ():
                tensor = about.get(what)
                if isinstance(tensor, Tensor) and tensor.shape != parameter.shape:
                    raise CheckpointMismatchError(
                        f"load: {name} has a parameter of shape {tuple(parameter.shape)} where the saved {what} is "
                        f"{tuple(tensor.shape)}. Nothing was loaded; make it with the same parameters, in order."
                    )


def _parameters(parts: Mapping[str, object]) -> dict[str, Tensor]:
    """Name the parameters of all modules among the parts; tied ones under each name."""
    found: dict[str, Tensor] = {}
    for part, value in parts.items():
        if isinstance(value, nn.Module):
            module = unwrap(value)
            state = module.state_dict(keep_vars=True)
            clean = clean_names(module, state)
            found |= {_qualified(part, clean[name]): p for name, p in state.items() if isinstance(p, nn.Parameter)}
    return found


def _qualified(part: str, name: str) -> str:
    return name if part == "model" else f"{part}/{name}"


def _group_sizes(groups: Any) -> list[int] | None:
    try:
        return [len(group["params"]) for group in groups]
    except (TypeError, LookupError):
        return None
