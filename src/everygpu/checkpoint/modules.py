"""A module's state by name: taken without the prefixes of wrappers, put into a module of other wrappers.

``torch.compile`` adds ``_orig_mod.``, DataParallel and DistributedDataParallel add ``module.``. They are
removed where the wrapper that adds them is found, at the top or inside, so that a user's own submodule
called ``module`` keeps its name.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from everygpu import keys
from everygpu.checkpoint.parts import EXTRA_STATE, is_version
from everygpu.checkpoint.values import identity
from everygpu.errors import CheckpointMismatchError
from everygpu.keys import bare_key, match_names
from everygpu.parallel.fully_sharded.shards import take_parts
from everygpu.torch_private.modules import NormBase
from everygpu.tree import map_leaves

logger = logging.getLogger("everygpu")

_MAX_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How exactly a module must be the one that was saved."""

    strict: bool = True
    """Whether names that only one of them has are an error."""
    prefix: str = ""
    """Only saved names that begin with it are loaded, without it."""
    ignore_mismatched: bool = False
    """Whether tensors of another shape are left out, instead of being an error."""


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return a module's values by name and the versions of its parts, without prefixes of wrappers."""
    state = model.state_dict()
    names = clean_names(model, state)
    versions = getattr(state, "_metadata", {})
    paths = clean_paths(model, versions)
    return {
        "values": {names[name]: value for name, value in state.items()},
        # Modules read their own version from here to understand old states (BatchNorm, for one).
        "versions": {paths[path]: dict(version) for path, version in versions.items()},
    }


def check_module(state: Any) -> None:
    """Raise a LookupError or TypeError unless a state read from a file has the structure of `module_state`'s."""
    for names in (state["values"], state["versions"]):
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names):
            raise TypeError("a module's values and versions must be dicts with names")
    if not all(is_version(entry) for entry in state["versions"].values()):
        raise TypeError("a version must be a dict with a whole number")


def plan_module(model: nn.Module, part: str, state: Any, fit: Fit) -> tuple[Callable[[], object], dict[str, str]]:
    """Check that a state fits a module; return what changes the module, and its own names by the saved ones."""
    values, own = state["values"], model.state_dict()
    chosen = [name for name in values if name.startswith(fit.prefix)]
    if values and not chosen:
        raise CheckpointMismatchError(
            f"load: No name in the checkpoint begins with the prefix {fit.prefix!r}; they are "
            f"{', '.join(list(values)[:3])}, … Pass what stands before the names of the part to load."
        )
    prefix = fit.prefix or find_prefix(chosen, own)
    strip = (lambda name: name.removeprefix(prefix)) if fit.prefix else (lambda name: strip_prefix(name, prefix))
    saved = rename({name: name for name in chosen}, strip)
    saved |= _tied_names(saved, own)
    own_names = {clean: raw for raw, clean in clean_names(model, own).items()}
    pairs = {there: own_names[here] for there, here in match_names(saved, own_names).items()}
    versions = _own_versions(model, own, state["versions"], prefix)
    left_out = _check_fit(
        part,
        {there: _difference(there, values[saved[there]], own[here]) for there, here in pairs.items()},
        sorted(own.keys() - pairs.values() - _made_by_torch(model, versions, set(pairs.values()))),
        sorted(saved.keys() - pairs.keys()),
        fit,
    )
    loaded = OrderedDict(
        (pairs.get(new, new), _outliving(new, values[there])) for new, there in saved.items() if new not in left_out
    )
    # torch reads the versions from this attribute: Module.load_state_dict.
    loaded._metadata = versions  # type: ignore[attr-defined]
    strict = fit.strict and not left_out

    def restore() -> None:
        take_parts(loaded, own)
        model.load_state_dict(loaded, strict=strict)

    return restore, {saved[new]: here for new, here in pairs.items()}


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


def clean_paths(model: nn.Module, paths: Iterable[str]) -> dict[str, str]:
    """Map each module's path to the one without wrappers."""
    known = dict(_clean_paths(model))
    return {path: known.get(f"{path}." if path else "", f"{path}.").rstrip(".") for path in paths}


def find_prefix(names: Iterable[str], expected: Collection[str]) -> str:
    """Find the prefix under which there are more than half of the expected names, as Lightning's ``model.``.

    Segments of wrappers count for nothing. Empty where the names fit at least as well without.
    """
    wanted = {bare_key(name) for name in expected}
    bare = [bare_key(name) for name in names]
    starts = ((name, [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]) for name in bare)
    fits = Counter(name[:i] for name, where in starts for i in where if name[i:] in wanted)
    best = max(fits.values(), default=0)
    if 2 * best <= len(wanted) or fits[""] == best:
        return ""
    first, *others = sorted(prefix for prefix, count in fits.items() if count == best)
    if others:
        raise CheckpointMismatchError(
            f"load: The model's names stand under more than one prefix: {', '.join([first, *others])}, with {best} "
            f"names each. Choose one prefix, for instance prefix={first!r}."
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
            raise CheckpointMismatchError(
                f"load: {name} would become {new!r} without its prefix, "
                f"which {'another has' if new else 'is no name'}. Choose another prefix."
            )
        renamed[new] = value
    return renamed


def _clean_paths(module: nn.Module, raw: str = "", clean: str = "") -> Iterator[tuple[str, str]]:
    """Yield what stands before the names of each module inside, and that without wrappers."""
    module = unwrap(module)
    inner = keys.wrapped_child(module)
    yield raw, clean
    for name, child in module._modules.items():
        if child is not None:
            yield from _clean_paths(child, f"{raw}{name}.", clean if name == inner else f"{clean}{name}.")


def _tied_names(saved: Mapping[str, str], own: Mapping[str, Any]) -> dict[str, str]:
    """Find the saved tensors of tied names that are missing: files of Transformers and Accelerate keep one of them."""
    known = {bare_key(name): there for name, there in saved.items()}
    tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor) and not is_lazy(tensor)}
    found = {identity(t): known[bare_key(name)] for name, t in tensors.items() if t.numel() and bare_key(name) in known}
    missing = [(name, identity(tensor)) for name, tensor in tensors.items() if bare_key(name) not in known]
    return {name: found[tensor] for name, tensor in missing if tensor in found}


def _outliving(name: str, value: Any) -> Any:
    """Copy what a module keeps as it is given: its extra state. Tensors it copies into its own."""
    if isinstance(value, Tensor) and not name.endswith(EXTRA_STATE):
        return value
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


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


def _check_fit(
    part: str, differences: Mapping[str, str | None], missing: list[str], unknown: list[str], fit: Fit
) -> Set[str]:
    """Refuse names and shapes that differ more than they may; return the names that are to be left out."""
    shapes = [f"{name}: {what}" for name, what in differences.items() if what is not None]
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
    return {name for name, what in differences.items() if what is not None}


def _listed(title: str, lines: list[str]) -> str:
    more = [f"… and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "".join(f"\n  {line}" for line in [f"{title} ({len(lines)}):", *lines[:_MAX_LISTED], *more]) if lines else ""


def _own_versions(
    model: nn.Module, own: Any, saved: Mapping[str, Any], prefix: str
) -> "OrderedDict[str, dict[str, Any]]":
    # Versions in foreign files stand under paths without wrappers' segments, their tensors need not.
    found = {bare_key(path): version for path, version in saved.items()} | dict(saved)
    versions = OrderedDict()
    for path, clean in clean_paths(model, getattr(own, "_metadata", {})).items():
        there = f"{prefix}{clean}".rstrip(".")
        version = found.get(there, found.get(bare_key(there)))
        if version is not None:
            versions[path] = dict(version)
    return versions


def _made_by_torch(model: nn.Module, versions: Mapping[str, Any], found: Set[str]) -> set[str]:
    """Name the counters that BatchNorm's states of before its version 2 lack, in PyTorch 0.4.0: it keeps its own."""
    norms = [path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, NormBase)]
    old = [path for path in norms if (versions.get(path, {}).get("version") or 1) < 2]
    stems = [f"{path}.".lstrip(".") for path in old]
    return {f"{stem}num_batches_tracked" for stem in stems if f"{stem}running_mean" in found}
