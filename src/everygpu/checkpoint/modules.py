"""Take a module's state by name, and put it into a module of the same or other names."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from everygpu.checkpoint.names import (
    EXTRA_STATE,
    clean_names,
    describe_mismatch,
    find_prefix,
    match_names,
    name_cleaner,
    rename,
    strip_prefix,
)
from everygpu.checkpoint.parts import is_version
from everygpu.checkpoint.values import identity
from everygpu.errors import CheckpointMismatchError
from everygpu.keys import bare_key
from everygpu.torch_private.modules import NormBase
from everygpu.tree import map_leaves

logger = logging.getLogger("everygpu")

Match: TypeAlias = Literal["name", "order"]
"""How saved tensors find theirs in the target: by name, or one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How exactly a module must be the one that was saved."""

    strict: bool = True
    """Whether names that only one of them has are an error."""
    match: Match = "name"
    prefix: str = ""
    """Only saved names that begin with it are loaded, without it."""
    ignore_mismatched: bool = False
    """Whether tensors of another shape are left out, instead of being an error."""


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return a module's values by name and the versions of its parts, without prefixes of wrappers."""
    state = model.state_dict()
    names = clean_names(model, state)
    clean = name_cleaner(model)
    versions = getattr(state, "_metadata", {})
    return {
        "values": {names[name]: value for name, value in state.items()},
        # Modules read their own version from here to understand old states (BatchNorm, for one).
        "versions": {clean(f"{path}.").rstrip("."): dict(version) for path, version in versions.items()},
    }


def plan_module(model: nn.Module, name: str, state: Any, fit: Fit) -> tuple[Callable[[], object], dict[str, str]]:
    """Check that a state fits a module; return what changes the module, and its own names by the saved ones."""
    own = model.state_dict()
    prefix = fit.prefix or ("" if fit.match == "order" else find_prefix(state["values"], own.keys()))
    versions = _select_versions({bare_key(p): v for p, v in state["versions"].items()} | state["versions"], prefix)
    if fit.prefix:
        saved, saved_names = _select(state["values"], prefix), {}
    else:
        saved_names = {strip_prefix(there, prefix): there for there in state["values"]}
        saved = rename(state["values"], lambda there: strip_prefix(there, prefix))
    saved = _with_tied(saved, own)
    if fit.match == "order":
        pairs = _pair_by_order(name, saved, own)
    else:
        own_names = {clean: raw for raw, clean in clean_names(model, own).items()}
        pairs = {there: own_names[here] for there, here in match_names(saved, own_names).items()}
    own_versions = _own_versions(model, own, versions, _paths(pairs) if fit.match == "order" else {})
    made = _made_by_torch(model, own_versions, set(pairs.values()))
    left_out = _check_names(name, saved, own, pairs, fit, made)
    values = {there: value for there, value in saved.items() if there not in left_out}
    loaded = OrderedDict((pairs.get(there, there), _outliving(there, value)) for there, value in values.items())
    # torch reads the versions from this attribute: Module.load_state_dict.
    loaded._metadata = own_versions  # type: ignore[attr-defined]
    strict = fit.strict and not left_out
    named = {saved_names.get(there, fit.prefix + there): here for there, here in pairs.items()}
    return lambda: model.load_state_dict(loaded, strict=strict), named


def check_module(state: Any) -> None:
    """Raise a LookupError or TypeError unless a state read from a file has the structure of `module_state`'s."""
    for names in (state["values"], state["versions"]):
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names):
            raise TypeError("a module's values and versions must be dicts with names")
    if not all(is_version(entry) for entry in state["versions"].values()):
        raise TypeError("a version must be a dict with a whole number")


def _select(saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    selected = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
    if saved and not selected:
        raise CheckpointMismatchError(
            f"load: No name in the checkpoint begins with the prefix {prefix!r}; they are "
            f"{', '.join(list(saved)[:3])}, … Pass what stands before the names of the part to load."
        )
    return selected


def _select_versions(saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Give versions by the path inside the part behind the prefix; the part itself has the empty path."""
    paths = {f"{path}.".lstrip("."): version for path, version in saved.items()}
    return {path.removeprefix(prefix)[:-1]: version for path, version in paths.items() if path.startswith(prefix)}


def _with_tied(values: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Add the tied names that are missing: safetensors files of Transformers and Accelerate keep one of them."""
    names = {bare_key(name): name for name in values}
    tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor) and not is_lazy(tensor)}
    there = {identity(t): names[bare_key(name)] for name, t in tensors.items() if t.numel() and bare_key(name) in names}
    missing = {name: there.get(identity(t)) for name, t in tensors.items() if bare_key(name) not in names}
    return values | {name: values[tied] for name, tied in missing.items() if tied is not None}


def _outliving(name: str, value: Any) -> Any:
    """Copy what a module keeps as it is given: its extra state. Tensors it copies into its own."""
    if isinstance(value, Tensor) and not name.endswith(EXTRA_STATE):
        return value
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def _pair_by_order(name: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """Pair the tensors of both sides one after the other; all must have the same shapes."""
    theirs = [(key, value.shape) for key, value in saved.items() if isinstance(value, Tensor)]
    ours = [(key, value.shape) for key, value in own.items() if isinstance(value, Tensor)]
    for index, ((there, saved_shape), (here, shape)) in enumerate(zip(theirs, ours), 1):
        if saved_shape != shape:
            raise CheckpointMismatchError(
                f"load: Tensor {index} is {there} {tuple(saved_shape)} in the checkpoint, {here} {tuple(shape)} in "
                f"{name}. Nothing was loaded; use match='name', or bring the modules into the same order."
            )
    if len(theirs) != len(ours):
        longer = theirs if len(theirs) > len(ours) else ours
        raise CheckpointMismatchError(
            f"load: The checkpoint has {len(theirs)} tensors, {name} {len(ours)}; the first without a partner is "
            f"{longer[min(len(theirs), len(ours))][0]}. Nothing was loaded; prefix= selects a part of the checkpoint."
        )
    pairs = {there: here for (there, _), (here, _) in zip(theirs, ours)}
    paths = _paths(pairs)
    for here, value in own.items():  # what is no tensor is paired as the tensors of its module
        path, _, last = here.rpartition(".")
        there = f"{paths.get(path, path)}.{last}".lstrip(".")
        if not isinstance(value, Tensor) and there in saved and not isinstance(saved[there], Tensor):
            pairs[there] = here
    return pairs


def _check_names(
    name: str, saved: Mapping[str, Any], own: Mapping[str, Any], pairs: Mapping[str, str], fit: Fit, optional: Set[str]
) -> dict[str, str]:
    """Refuse names and shapes that differ more than they may; return how those differ that are to be left out."""
    differing = {there: _difference(there, saved[there], own[here]) for there, here in pairs.items()}
    shapes = {there: what for there, what in differing.items() if what is not None}
    missing = sorted(own.keys() - pairs.values() - optional) if fit.strict else []
    unexpected = sorted(saved.keys() - pairs.keys()) if fit.strict else []
    refused = {} if fit.ignore_mismatched else shapes
    if missing or unexpected or refused:
        advice = " ignore_mismatched=True leaves those of another shape out." if refused else ""
        advice += " strict=False loads the names that both have." if missing or unexpected else ""
        raise CheckpointMismatchError(
            f"load: {name} has other names and shapes than the checkpoint: {len(missing)} missing, {len(unexpected)} "
            f"unknown and {len(refused)} of another shape. Nothing was loaded.{advice}"
            f"{describe_mismatch(missing, unexpected, refused)}"
        )
    if shapes:
        listed = "".join(f"\n  {there}: {what}" for there, what in shapes.items())
        logger.warning("load: %d tensors of %s keep their values, as their shapes differ:%s", len(shapes), name, listed)
    return shapes


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


def _made_by_torch(model: nn.Module, versions: Mapping[str, Any], found: Set[str]) -> set[str]:
    """Name the counters that BatchNorm's states of before its version 2 lack, in PyTorch 0.4.0: it keeps its own."""
    norms = [path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, NormBase)]
    old = [path for path in norms if (versions.get(path, {}).get("version") or 1) < 2]
    names = [(f"{path}.running_mean".lstrip("."), f"{path}.num_batches_tracked".lstrip(".")) for path in old]
    return {counter for mean, counter in names if mean in found}


def _paths(pairs: Mapping[str, str]) -> dict[str, str]:
    """Return the saved path of each module that has tensors, by its own path."""
    return {here.rpartition(".")[0]: there.rpartition(".")[0] for there, here in pairs.items()}


def _own_versions(
    model: nn.Module, own: object, saved: Mapping[str, Any], partners: Mapping[str, str]
) -> "OrderedDict[str, Any]":
    clean = name_cleaner(model)
    paths = {path: partners.get(path, clean(f"{path}.").rstrip(".")) for path in getattr(own, "_metadata", {})}
    # Versions in foreign files stand under paths without wrappers' segments, their tensors need not.
    found = ((path, saved.get(there, saved.get(bare_key(there)))) for path, there in paths.items())
    return OrderedDict((path, dict(version)) for path, version in found if version is not None)
