"""Take the state of a module, optimizer, scheduler, generator or plain value, and put it back.

Putting back is planned first and done later: planning checks everything that can be checked and changes
nothing, so that a load either changes all its targets or none.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everygpu.checkpoint.format import cut
from everygpu.checkpoint.modules import Fit, module_state, name_cleaner, plan_module, unwrap
from everygpu.checkpoint.parts import KNOWN, Contents, Kind, Part, find_state
from everygpu.checkpoint.values import Json, encode
from everygpu.errors import CheckpointContentError, CheckpointMismatchError
from everygpu.tree import map_leaves

Restore: TypeAlias = Callable[[], object]

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


def require_names(misplaced: tuple[object, ...], function: str, call: str) -> None:
    """Refuse what was passed without saying what it is."""
    if misplaced:
        kind = type(misplaced[0]).__qualname__
        raise CheckpointContentError(f"{function}: Parts are passed by name, got a {kind} without one. Write {call}.")


def encode_parts(parts: Mapping[str, object], tensors: Mapping[str, dict[str, Tensor]]) -> Json:
    """Turn the states of all parts into JSON, putting their own tensors aside under ``"model"`` and ``"training"``."""
    names: dict[int, str] = {}
    for name, parameter in _parameters(parts).items():
        names.setdefault(id(parameter), name)
    encoded = {}
    for name, value in parts.items():
        kind, group = kind_of(value), tensors["model" if name == "model" else "training"]
        part: dict[str, Any] = {"kind": kind}
        if (known := class_name(value)) is not None:
            part["class"] = known
        groups = getattr(value, "param_groups", None)
        if kind == "state_dict" and isinstance(groups, list) and _group_sizes(groups) is not None:
            part["parameters"] = [[names.get(id(p)) for p in group["params"]] for group in groups]
        state, path = _take(value, kind), "" if name == "model" else name
        if kind == "module":  # a model's tensors are stored under the very names it has for them
            part["state"] = {about: encode(entries, path, group) for about, entries in state.items()}
        else:
            part["state"] = encode(state, path, group)
        encoded[name] = part
    return encoded


class Plan:
    """What a load will do, made part by part; the model's names decide which optimizer state is whose."""

    def __init__(self, contents: Contents, targets: Mapping[str, object], fit: Fit) -> None:
        self._contents, self._targets = contents, targets
        self._own_parameters = _parameters(targets)
        self._own_names: dict[str, str] = {}
        """Of parameters, by their saved names."""
        modules = [name for name in targets if kind_of(targets[name]) == "module"]
        planned = {name: self._plan_module(name, fit) for name in modules}
        # What is checked least is restored first, the model last.
        rest = [name for name in targets if name not in planned]
        rest.sort(key=lambda name: name in ("optimizer", "scheduler"))
        self.restores = [self._plan(name) for name in rest] + [planned[name] for name in reversed(modules)]

    def _plan_module(self, name: str, fit: Fit) -> Restore:
        model, part = unwrap(cast(nn.Module, self._targets[name])), self._part(name, "module")
        restore, pairs = plan_module(model, name, part.state, fit if name == "model" else Fit(strict=fit.strict))
        clean = name_cleaner(model)
        self._own_names |= {_qualified(name, there): _qualified(name, clean(here)) for there, here in pairs.items()}
        return restore

    def _plan(self, name: str) -> Restore:
        target, kind = self._targets[name], kind_of(self._targets[name])
        part = self._part(name, kind)
        if kind == "generator":
            return _plan_generator(cast(torch.Generator, target), name, part.state)
        state = part.state
        if getattr(target, "param_groups", None) is not None:
            _check_group_sizes(target, name, state)
        _check_class(target, name, part.class_name, state)
        if getattr(target, "param_groups", None) is not None:
            state = self._in_own_order(target, name, part)
            _check_shapes(target, name, state)
        return lambda: cast(Any, target).load_state_dict(state)

    def _part(self, name: str, kind: Kind) -> Part:
        part = require_part(self._contents, name)
        if part.kind is None and kind == "module":
            part = find_state(part.state) or part
        elif part.kind is None and kind != "module" and isinstance(part.state, Mapping | Tensor):
            part = replace(part, kind=kind, state=detach(part.state, torch.device("cpu")))
        if part.kind != kind:
            raise CheckpointMismatchError(
                f"load: {name} was saved as a {part.kind or type(part.state).__qualname__}, which "
                f"{type(self._targets[name]).__qualname__} can't take. Leave it out to get the saved value back in "
                f"load's result."
            )
        return part

    def _in_own_order(self, target: Any, name: str, part: Part) -> Any:
        """Order the saved groups' parameters as the target's, by the names that the parameters have in the models."""
        saved = part.parameters
        if saved is None or any(known is None for group in saved for known in group):
            return part.state
        if not self._own_names:
            raise CheckpointMismatchError(
                f"load: {name}'s state is kept by the names of the model's parameters. Pass the model along: "
                f"load(path, model=model, {name}={name})."
            )
        groups = []
        for theirs, group, own in zip(saved, part.state["param_groups"], target.param_groups):
            named = [self._own_parameters.get(self._own_names.get(str(known), "")) for known in theirs]
            ids = {id(parameter): i for parameter, i in zip(named, group["params"])}
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


def require_part(contents: Contents, name: str) -> Part:
    """Return a part that is asked for."""
    place = contents.parts if name in KNOWN else contents.extras
    if name in place:
        return place[name]
    near = get_close_matches(name, place, n=1)
    hint = f"Did you mean {near[0]}?" if near else "Leave it out, or save it too."
    raise CheckpointMismatchError(f"load: The checkpoint has no part named {name}. Nothing was loaded. {hint}")


def detach(value: Any, device: torch.device) -> Any:
    """Copy every tensor in a value, so that it outlives the file."""
    return map_leaves(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf, value)


def class_name(value: object) -> str | None:
    """Name an optimizer's or a scheduler's class, by which its state is known; None for any other object.

    A wrapper counts as the optimizer inside, a subclass of one of torch's classes as that class.
    """
    while isinstance(value, Optimizer):
        found = (getattr(value, name, None) for name in _INNER)
        inner = next((one for one in found if isinstance(one, Optimizer) and one is not value), None)
        if inner is None:
            break
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


def _check_class(target: Any, name: str, saved: str | None, state: Any) -> None:
    """Refuse the state of another class, or, where the file names none, one with other settings in place of its own."""
    own, what = class_name(target), None
    if own is None or saved == own:
        return
    if saved is not None and saved.rpartition(".")[2] != own.rpartition(".")[2]:  # it may have moved to another module
        what = saved
    elif isinstance(state, Mapping):
        is_optimizer = isinstance(target, Optimizer)
        wanted = set(target.defaults if is_optimizer else target.state_dict())
        known = wanted.union(*target.param_groups) if is_optimizer else wanted
        found = set().union(*state["param_groups"]) if is_optimizer else set(state)
        missing, unknown = sorted(wanted - found - _OPTIONAL), sorted(found - known - _OPTIONAL)
        if missing and unknown:
            what = f"another class: it has {', '.join(unknown)}, where {own} has {', '.join(missing)}"
    if what is not None:
        raise CheckpointMismatchError(
            f"load: {name} is of {own}, and the saved state of {what}. Nothing was loaded; make one of that class, or "
            f"leave {name} out."
        )


def _take(value: object, kind: Kind) -> Any:
    if kind == "module":
        return module_state(unwrap(cast(nn.Module, value)))
    if kind == "generator":
        return cast(torch.Generator, value).get_state()
    return cast(Any, value).state_dict() if kind == "state_dict" else value


def _parameters(parts: Mapping[str, object]) -> dict[str, Tensor]:
    """Name the parameters of all modules among the parts; tied ones under each name."""
    found: dict[str, Tensor] = {}
    for part, value in parts.items():
        if isinstance(value, nn.Module):
            module = unwrap(value)
            clean = name_cleaner(module)
            named = module.state_dict(keep_vars=True).items()
            found |= {_qualified(part, clean(name)): p for name, p in named if isinstance(p, nn.Parameter)}
    return found


def _qualified(part: str, name: str) -> str:
    return name if part == "model" else f"{part}/{name}"


def _plan_generator(target: torch.Generator, name: str, state: Any) -> Restore:
    if not isinstance(state, Tensor) or state.shape != target.get_state().shape:
        raise CheckpointMismatchError(
            f"load: {name} is a generator on {target.device}, and one of another type of device was saved. Make it "
            f"there, or leave it out."
        )
    return lambda: target.set_state(state.cpu())


def _check_group_sizes(target: Any, name: str, state: Any) -> None:
    saved = state.get("param_groups") if isinstance(state, Mapping) else None
    if (sizes := _group_sizes(saved)) != (own_sizes := _group_sizes(target.param_groups)):
        raise CheckpointMismatchError(
            f"load: {name} was saved with parameter groups of {sizes} parameters, got {own_sizes}. Nothing was loaded; "
            f"make the optimizer with the same parameters."
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


def _group_sizes(groups: Any) -> list[int] | None:
    try:
        return [len(group["params"]) for group in groups]
    except (TypeError, LookupError):
        return None
