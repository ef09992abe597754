"""Collect the state of a module, optimizer, scheduler, generator or plain value, and restore it.

Restoring is planned first and done later: planning checks everything that can be checked and changes
nothing, so that a load either changes all its targets or none.

A module's state goes by name, without what wrappers put in front: that is removed where the wrapper is found, at the
top or inside, so that a user's own submodule called ``module`` keeps its name.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeAlias, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everygpu import keys
from everygpu.checkpoint.format import MODEL, TRAINING
from everygpu.checkpoint.parts import EXTRA_STATE, KNOWN, Contents, Kind, Part, find_state
from everygpu.checkpoint.values import Json, cut, encode, identity
from everygpu.errors import CheckpointContentError, CheckpointError, CheckpointForeignError, CheckpointMismatchError
from everygpu.keys import bare_key, match_names
from everygpu.parallel.fully_sharded.shards import is_shard, shard_like, shard_state
from everygpu.torch_private.core import NormBase
from everygpu.tree import map_leaves

logger = logging.getLogger("everygpu")

Restore: TypeAlias = Callable[[], object]

_INNER = ("module", "optimizer", "_optimizer", "optim")
"""Attributes under which optimizers that wrap another one have it: ours, Accelerate's, Lightning's, torch's ZeRO."""
_BASES = ("Optimizer", "LRScheduler", "_LRScheduler")
_LATER = frozenset({"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"})
"""Settings of optimizers that some versions of torch lack."""
_BY_SHAPE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")
"""Of an optimizer's state: tensors of the parameter's shape."""
_MAX_LISTED = 20
LOAD_OPTIONS = frozenset({"strict", "prefix", "ignore_mismatched", "rng", "verify"})
"""Names that `everygpu.load` takes for itself."""
_ADVICE = {
    "map_location": "Leave it out: tensors go to where the objects have theirs.",
    "weights_only": "Leave it out: nothing in a file is ever executed.",
    "mmap": "Leave it out: files are mapped where they can be.",
    "save_top_k": "Write best=('loss', 'min', 3), or keep=3 for the newest.",
}
"""For options of torch and Lightning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How exactly a module must be the one that was saved."""

    strict: bool = True
    """Whether names that only one of them has are an error."""
    prefix: str = ""
    """Only saved names that begin with it are loaded, without it."""
    ignore_mismatched: bool = False
    """Whether tensors of another shape are left out, instead of being an error."""


def kind_of(value: object) -> Kind:
    """Return how a value is saved and restored."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.Generator):
        return "generator"
    has_state = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return "state_dict" if has_state and not isinstance(value, type) else "plain"


def check_parts(parts: Mapping[str, object], function: str) -> None:
    """Refuse a model, an optimizer or a scheduler that is nothing of the kind, or under a misspelt name."""
    for name, part in parts.items():
        kind, got = kind_of(part), type(part).__qualname__
        near = get_close_matches(name, KNOWN, n=1, cutoff=0.8)
        if near and near[0] not in name and kind != "plain":
            raise CheckpointContentError(f"{function}: {name} is a {got}. Did you mean {near[0]}=?")
        if name in KNOWN and kind != ("module" if name == "model" else "state_dict"):
            what = "a torch.nn.Module" if name == "model" else "an object with state_dict and load_state_dict"
            raise CheckpointContentError(
                f"{function}: {name} must be {what}, got {got}. Pass the object itself, not its state."
            )


def check_targets(targets: Mapping[str, object], function: str, options: Collection[str]) -> None:
    """Refuse what can't be restored in place, as options of others, or misspelt ones, can't."""
    check_parts(targets, function)
    for name, target in targets.items():
        if kind_of(target) == "plain":
            near = get_close_matches(name, options, n=1)
            otherwise = f"Did you mean {near[0]}=?" if near else "Leave it out and read it from load's result."
            what = f"{name} must be an object to restore in place, got {type(target).__qualname__}"
            raise CheckpointContentError(f"{function}: {what}. {_ADVICE.get(name, otherwise)}")


def has_shards(part: Any) -> bool:
    """Whether a model or an optimizer has tensors that are sharded over ranks."""
    if isinstance(part, nn.Module):  # by the class: some parameters may be whole right now
        return any(kind.__name__ == "FSDPModule" for module in part.modules() for kind in type(module).__mro__)
    groups: Any = getattr(part, "param_groups", None)
    return isinstance(groups, list) and any(is_shard(p) for group in groups for p in group["params"])


def encode_parts(parts: Mapping[str, object], tensors: Mapping[str, dict[str, Tensor]]) -> Json:
    """Turn the states of all parts into JSON, putting their tensors aside under `MODEL` and `TRAINING`."""
    names = {id(p): name for name, p in reversed(_parameters(parts).items())}  # of several names the first
    encoded = {}
    for name, value in parts.items():
        kind, group = kind_of(value), tensors[MODEL if name == "model" else TRAINING]
        part: dict[str, Any] = {"kind": kind}
        if (known := class_name(value)) is not None:
            part["class"] = known
        groups = getattr(value, "param_groups", None)
        if kind == "state_dict" and isinstance(groups, list) and _group_sizes(groups) is not None:
            part["parameters"] = [[names.get(id(p)) for p in group["params"]] for group in groups]
        of = cast(Any, value)
        if kind == "module":
            model = unwrap(of)
            state = cast(Any, model.state_dict())
            cleaned, paths = clean_names(model, state), _paths_of_versions(model, state)
            values = {cleaned[key]: entry for key, entry in state.items()}
            # Modules read their own version from here to understand old states (BatchNorm, for one).
            versions = {clean: dict(state._metadata[path]) for path, clean in paths.items()}
            path = "" if name == "model" else name  # its tensors are stored under the very names it has for them
            part["state"] = {"values": encode(values, path, group), "versions": encode(versions, path, group)}
        else:
            state = of.get_state() if kind == "generator" else of.state_dict() if kind == "state_dict" else of
            part["state"] = encode(state, name, group)
        encoded[name] = part
    return encoded


def plan_parts(contents: Contents, targets: Mapping[str, Any], fit: Fit) -> dict[str, Restore]:
    """Check that a checkpoint fits its targets; return what puts it into each, in this order."""
    modules = {name: target for name, target in targets.items() if kind_of(target) == "module"}
    restores: dict[str, Restore] = {}
    own_names: dict[str, str] = {}
    for name, target in modules.items():
        model, state = unwrap(target), _require_part(contents, name, target).state
        restore, pairs = _plan_module(model, name, state, fit if name == "model" else Fit(strict=fit.strict))
        restores = {name: restore, **restores}
        own_names |= {_qualified(name, there): _qualified(name, here) for there, here in pairs.items()}
    parameters = _parameters(targets)
    named = {there: parameters[here] for there, here in own_names.items() if here in parameters}
    # What is checked least is restored first, the model last.
    planned = {}
    for name in sorted([name for name in targets if name not in modules], key=KNOWN.__contains__):
        with _explained(name, targets[name]):
            planned[name] = _plan(name, targets[name], _require_part(contents, name, targets[name]), named)
    return planned | restores


def detach(value: Any) -> Any:
    """Copy every tensor and array in a value, so that it outlives the file; what is one in it stays one."""
    copies: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor | numpy.ndarray):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone() if isinstance(leaf, Tensor) else leaf.copy()
        return copies[id(leaf)]

    try:
        return map_leaves(copy, value)
    except RecursionError as cause:
        raise CheckpointForeignError(
            f"load: A {type(value).__name__} in the file contains itself, or is nested too deep. Nothing was loaded."
        ) from cause


def _mismatch(name: str, what: str, todo: str = "") -> CheckpointMismatchError:
    return CheckpointMismatchError(f"load: {name} {what}. Nothing was loaded; {todo}leave {name} out.")


@contextmanager
def _explained(name: str, target: object) -> Iterator[None]:
    """Name what is saved where torch's own objects can't take it; what a user's object raises is the user's."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as cause:
        if isinstance(cause, CheckpointError) or (class_name(target) is None and kind_of(target) != "generator"):
            raise
        raise _mismatch(name, f"can't take the saved state ({type(cause).__name__}: {cut(cause)})") from cause


def restore_all(targets: Mapping[str, Any], restores: Mapping[str, Restore]) -> None:
    """Change all targets; where the ``load_state_dict`` of one raises, put those back that are no modules."""
    before: dict[str, Restore] = {}
    try:
        for name, restore in restores.items():
            target: Any = targets.get(name)
            kind = kind_of(target)
            if kind == "generator":
                before[name] = partial(target.set_state, target.get_state())
            elif kind == "state_dict":  # torch's own replace their state, and need no copy of it
                state = target.state_dict() if class_name(target) else detach(target.state_dict())
                before[name] = partial(target.load_state_dict, state)
            with _explained(name, target):
                restore()
    except BaseException:
        for put_back in before.values():
            with suppress(Exception):
                put_back()
        raise


def _require_part(contents: Contents, name: str, target: object) -> Part:
    """Return a part that is asked for, of the kind that its target takes; copied, except for modules' tensors."""
    place = contents.parts if name in KNOWN else contents.extras
    if name not in place:
        near = get_close_matches(name, place, n=1)
        hint = f"Did you mean {near[0]}?" if near else "Leave it out, or save it too."
        sizes = {n: f" (a list of {len(p.state)})" if type(p.state) is list else "" for n, p in contents.extras.items()}
        known = ", ".join(cut(n) + sizes.get(n, "") for n in (*contents.parts, *contents.extras)) or "nothing"
        raise CheckpointMismatchError(
            f"load: The checkpoint has no part named {name}. Nothing was loaded. {hint} It has {known}."
        )
    part, kind = place[name], kind_of(target)
    if part.kind is None and kind == "module":
        part = find_state(part.state) or part
    elif part.kind is None and isinstance(part.state, Mapping | Tensor):
        part = replace(part, kind=kind)
    if part.kind != kind:
        what = f"{name} was saved as a {part.kind or type(part.state).__qualname__}"
        todo = f"which {type(target).__qualname__} can't take. Leave it out to get it back in load's result"
        raise CheckpointMismatchError(f"load: {what}, {todo}.")
    return part if kind == "module" or has_shards(target) else replace(part, state=detach(part.state))


# Modules, by name.


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module where everygpu.DataParallel wraps it: that is whose state it gives."""
    return keys.unwrap(model) if getattr(type(model), "wraps_a_module", False) else model


def clean_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Map each name in a module's state to the name it is stored under, without wrappers' prefixes; all different."""
    paths = dict(_clean_paths(model))

    def clean(name: str) -> str:
        head = name[: name.rfind(".") + 1]
        while head not in paths:
            head = head[: head[:-1].rfind(".") + 1]
        return paths[head] + name[len(head) :]

    cleaned = {name: clean(name) for name in names}
    # A wrapper with state of its own may share a name with the module inside.
    return cleaned if len(set(cleaned.values())) == len(cleaned) else {name: name for name in names}


def find_prefix(names: Iterable[str], expected: Collection[str]) -> str:
    """Find the prefix with more than half of the expected names, as Lightning's ``model.``; none if they fit so."""
    wanted = {bare_key(name) for name in expected}
    bare = [bare_key(name) for name in names]
    starts = ((name, [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]) for name in bare)
    fits = Counter(name[:i] for name, where in starts for i in where if name[i:] in wanted)
    best = max(fits.values(), default=0)
    if 2 * best <= len(wanted) or fits[""] == best:
        return ""
    first, *others = sorted(prefix for prefix, count in fits.items() if count == best)
    if others:
        known = cut(", ".join([first, *others]))
        raise CheckpointMismatchError(
            f"load: More than one prefix fits: {known}, with {best} names each. Pass prefix={first!r}."
        )
    return first


def strip_prefix(name: str, prefix: str) -> str:
    """Take a prefix and the segments of wrappers off a name that has the prefix; leave others alone."""
    bare = bare_key(name)
    return bare.removeprefix(prefix) if prefix and bare.startswith(prefix) else name


def rename(state: Mapping[str, Any], new_name: Callable[[str], str]) -> dict[str, Any]:
    """Give every entry another name, all different and none empty."""
    renamed: dict[str, Any] = {}
    for name, value in state.items():
        new = new_name(name)
        if not new or new in renamed:
            what = "which another has" if new else "no name"
            raise CheckpointMismatchError(f"load: {cut(name)} would become {new!r}, {what}. Choose another prefix.")
        renamed[new] = value
    return renamed


def _clean_paths(module: nn.Module, raw: str = "", clean: str = "") -> Iterator[tuple[str, str]]:
    """Yield the prefix of the names of each module inside, and the same without wrappers."""
    module = unwrap(module)
    inner = keys.wrapped_child(module)
    yield raw, clean
    for name, child in module._modules.items():
        if child is not None:
            yield from _clean_paths(child, f"{raw}{name}.", clean if name == inner else f"{clean}{name}.")


def _paths_of_versions(model: nn.Module, state: Any) -> dict[str, str]:
    """Map the path of each module that has a version to the one without wrappers."""
    known = dict(_clean_paths(model))
    versions = getattr(state, "_metadata", {})
    return {path: known.get(f"{path}." if path else "", f"{path}.").rstrip(".") for path in versions}


def _plan_module(model: nn.Module, part: str, state: Any, fit: Fit) -> tuple[Restore, dict[str, str]]:
    """Check that a state fits a module; return what changes the module, and its clean names by the saved ones."""
    values, own = state["values"], model.state_dict()
    chosen = [name for name in values if name.startswith(fit.prefix)]
    if values and not chosen:
        raise CheckpointMismatchError(
            f"load: No name in the checkpoint begins with the prefix {fit.prefix!r}; they are "
            f"{cut(', '.join(list(values)[:3]))}, … Pass the prefix of the part to load."
        )
    prefix = fit.prefix or find_prefix(chosen, own)
    strip = (lambda name: name.removeprefix(prefix)) if fit.prefix else (lambda name: strip_prefix(name, prefix))
    saved = rename({name: name for name in chosen}, strip)
    saved |= _tied_names(saved, own)
    own_names = {clean: raw for raw, clean in clean_names(model, own).items()}
    matched = match_names(saved, own_names)
    pairs = {there: own_names[here] for there, here in matched.items()}
    # In foreign files, versions are keyed by paths without wrappers' segments; tensors may not be.
    named = {bare_key(path): version for path, version in state["versions"].items()} | dict(state["versions"])
    versions: OrderedDict[str, dict[str, Any]] = OrderedDict()
    own_versions = getattr(own, "_metadata", {})
    for path, clean in _paths_of_versions(model, own).items():
        there = f"{prefix}{clean}".rstrip(".")
        entry = named.get(there) or named.get(bare_key(there)) or {}
        version, known = entry.get("version"), own_versions[path].get("version")
        if entry and (isinstance(version, int | None) or type(version) is type(known)):  # the module compares the two
            versions[path] = dict(entry)
    found = ((new, _difference(new, values[saved[new]], own[here])) for new, here in pairs.items())
    left_out = {new: what for new, what in found if what is not None}
    made = _made_by_torch(model, versions, set(pairs.values()))
    _check_fit(part, left_out, sorted(own.keys() - pairs.values() - made), sorted(saved.keys() - pairs.keys()), fit)
    loaded: OrderedDict[str, Any] = OrderedDict()
    for new, there in saved.items():
        if new not in left_out:  # a module copies tensors into its own, and keeps extra state as it is given
            is_copied = isinstance(values[there], Tensor) and not new.endswith(EXTRA_STATE)
            loaded[pairs.get(new, new)] = values[there] if is_copied else detach(values[there])
    # torch reads the versions from this attribute: Module.load_state_dict.
    loaded._metadata = versions  # type: ignore[attr-defined]

    def restore() -> None:
        shard_state(loaded, own)
        model.load_state_dict(loaded, strict=fit.strict and not left_out)

    return restore, {saved[new]: here for new, here in matched.items()}


def _tied_names(saved: Mapping[str, str], own: Mapping[str, Any]) -> dict[str, str]:
    """Find the saved tensors of tied names that are missing: files of Transformers and Accelerate keep one of them."""
    known = {bare_key(name): there for name, there in saved.items()}
    tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor) and not is_lazy(tensor)}
    found = {identity(t): known[bare_key(name)] for name, t in tensors.items() if t.numel() and bare_key(name) in known}
    missing = [(name, identity(tensor)) for name, tensor in tensors.items() if bare_key(name) not in known]
    return {name: found[tensor] for name, tensor in missing if tensor in found}


def _made_by_torch(model: nn.Module, versions: Mapping[str, Any], found: Set[str]) -> set[str]:
    """Name the counters that BatchNorm's states of before its version 2 lack, in PyTorch 0.4.0: it keeps its own."""
    norms = [path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, NormBase)]
    old = [path for path in norms if (versions.get(path, {}).get("version") or 1) < 2]
    stems = [f"{path}.".lstrip(".") for path in old]
    return {f"{stem}num_batches_tracked" for stem in stems if f"{stem}running_mean" in found}


def _difference(name: str, saved: object, own: object) -> str | None:
    if not isinstance(own, Tensor) or is_lazy(own) or name.endswith(EXTRA_STATE):
        return None
    if not isinstance(saved, Tensor):
        return f"a {type(saved).__name__} in the checkpoint, a tensor in the target"
    if saved.shape != own.shape:
        return f"{tuple(saved.shape)} in the checkpoint, {tuple(own.shape)} in the target"
    if saved.is_complex() and not own.is_complex():
        return f"{saved.dtype} in the checkpoint, {own.dtype} in the target"
    return None


def _check_fit(part: str, differences: Mapping[str, str], missing: list[str], unknown: list[str], fit: Fit) -> None:
    """Refuse names and shapes that differ more than they may."""
    shapes = [f"{name}: {what}" for name, what in differences.items()]
    missing, unknown = (missing, unknown) if fit.strict else ([], [])
    refused = [] if fit.ignore_mismatched else shapes
    if missing or unknown or refused:
        advice = " ignore_mismatched=True leaves those of another shape out." if refused else ""
        advice += " strict=False loads the names that both have." if missing or unknown else ""
        raise CheckpointMismatchError(
            f"load: {part} has other names and shapes than the checkpoint: {len(missing)} missing, {len(unknown)} "
            f"unknown and {len(refused)} of another shape. Nothing was loaded.{advice}"
            f"{_listed('missing in the checkpoint', missing)}{_listed('unknown to the target', unknown)}"
            f"{_listed('of another shape', refused)}"
        )
    if shapes:
        logger.warning("load: Tensors of %s keep their values%s", part, _listed("of another shape", shapes))


def _listed(title: str, lines: list[str]) -> str:
    more = [f"… and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    shown = [f"{title} ({len(lines)}):", *map(cut, lines[:_MAX_LISTED]), *more]
    return "".join(f"\n  {line}" for line in shown) if lines else ""


# Optimizers, schedulers, generators.


def class_name(value: object) -> str | None:
    """Name the class of torch's that an optimizer or a scheduler is, or wraps; else its own; None for other objects."""
    if not isinstance(value, Optimizer | LRScheduler):
        return None
    found = (getattr(value, name, None) for name in _INNER if isinstance(value, Optimizer))
    inner = next((one for one in found if isinstance(one, Optimizer) and one is not value), None)
    if inner is not None:
        return class_name(inner)
    kinds = (k for k in type(value).__mro__ if k.__module__.startswith("torch.optim.") and k.__name__ not in _BASES)
    kind = next(kinds, type(value))
    return f"{kind.__module__}.{kind.__qualname__}"


def _plan(name: str, target: Any, part: Part, named: Mapping[str, Tensor]) -> Restore:
    state = part.state
    if isinstance(target, torch.Generator):
        if not isinstance(state, Tensor) or state.shape != target.get_state().shape:
            what = f"is a generator on {target.device}, and one of another type of device was saved"
            raise _mismatch(name, what, "make it there, or ")
        return lambda: target.set_state(state)
    is_optimizer = getattr(target, "param_groups", None) is not None
    if is_optimizer:
        saved = state.get("param_groups") if isinstance(state, Mapping) else None
        if (sizes := _group_sizes(saved)) != (own_sizes := _group_sizes(target.param_groups)):
            what = f"was saved with parameter groups of {sizes} parameters, got {own_sizes}"
            raise _mismatch(name, what, "make it with the same parameters, or ")
    _check_class(target, name, part.class_name, state)
    if is_optimizer:
        state = _take_own(target, name, _in_own_order(target, name, part, named))
    return lambda: target.load_state_dict(state)


def _check_class(target: Any, name: str, saved: str | None, state: Any) -> None:
    """Refuse the state of another class; where the file names none, of an optimizer with other settings."""
    own, what = class_name(target), None
    if own is not None and saved is not None:
        what = saved if saved.rpartition(".")[2] != own.rpartition(".")[2] else None  # it may be in another module now
    elif isinstance(target, Optimizer) and state["param_groups"]:
        lacking = sorted(target.defaults.keys() - state["param_groups"][0].keys() - _LATER)
        what = f"another class, without {', '.join(lacking)}" if lacking else None
    if what is not None:
        raise _mismatch(name, f"is of {own}, and the saved state of {what}", "make one of that class, or ")


def _in_own_order(target: Any, name: str, part: Part, named: Mapping[str, Tensor]) -> Any:
    """Order the saved groups' parameters as the target's, by the names that the parameters have in the models."""
    saved = part.parameters
    if saved is None or any(known is None for group in saved for known in group):
        return part.state
    if not named:
        todo = f"Pass the model as well: load(path, model=model, {name}={name})."
        raise CheckpointMismatchError(f"load: {name}'s state is kept by the names of the model's parameters. {todo}")
    groups = []
    for theirs, group, own in zip(saved, part.state["param_groups"], target.param_groups):
        ids = {id(named.get(str(known))): i for known, i in zip(theirs, group["params"])}
        order = [ids.get(id(p)) for p in own["params"]]
        is_one_state = isinstance(target, LBFGS)  # of all parameters together
        if None in order or (is_one_state and order != list(group["params"])):
            known = cut(", ".join(map(str, theirs)))
            what = f"has other parameters, or in another order, than the saved group of {known}"
            raise _mismatch(name, what, "make it with the same parameters in each group, or ")
        groups.append({**group, "params": order})
    return {**part.state, "param_groups": groups}


def _take_own(target: Any, name: str, state: Any) -> Any:
    """Refuse moments of other parameters; keep this rank's rows of moments that are sharded."""
    has_rows = has_shards(target)
    found = dict(state["state"]) if has_rows else {}
    for group, own in zip(state["param_groups"], target.param_groups):
        for key, p in zip(group["params"], own["params"]):
            about = state.get("state", {}).get(key)
            if not isinstance(about, Mapping):
                continue
            for what in _BY_SHAPE:
                if isinstance(tensor := about.get(what), Tensor) and tensor.shape != p.shape:
                    shapes = f"{tuple(p.shape)} where the saved {what} is {tuple(tensor.shape)}"
                    raise _mismatch(name, f"has a parameter of shape {shapes}", "make it with the same ones, or ")
            if has_rows:
                tensors = {k: v for k, v in about.items() if isinstance(v, Tensor) and is_shard(p)}
                if other := next((k for k, v in tensors.items() if v.numel() > 1 and v.shape != p.shape), None):
                    what = f"keeps {cut(other)} of another shape than its parameter's, as Adafactor does, which torch "
                    raise _mismatch(name, f"{what}can't update on sharded parameters", "choose another one, or ")
                is_part = {k: k in tensors and v.shape == p.shape for k, v in about.items()}
                found[key] = {k: shard_like(v, p) if is_part[k] else detach(v) for k, v in about.items()}
    return {**state, "state": found} if has_rows else state


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
