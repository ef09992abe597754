"""A module's state by name: taken without the prefixes of wrappers, put into a module of other wrappers.

``torch.compile`` adds ``_orig_mod.``, DataParallel and DistributedDataParallel add ``module.``. They are
removed where the wrapper that adds them is found, at the top or inside, so that a user's own submodule
called ``module`` keeps its name.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from everygpu import keys
from everygpu.checkpoint.parts import EXTRA_STATE, is_version
from everygpu.checkpoint.values import identity
from everygpu.errors import CheckpointMismatchError
from everygpu.keys import bare_key
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
    names, clean = clean_names(model, state), name_cleaner(model)
    versions = getattr(state, "_metadata", {})
    return {
        "values": {names[name]: value for name, value in state.items()},
        # Modules read their own version from here to understand old states (BatchNorm, for one).
        "versions": {clean(f"{path}.").rstrip("."): dict(version) for path, version in versions.items()},
    }


def check_module(state: Any) -> None:
    """Raise a LookupError or TypeError unless a state read from a file has the structure of `module_state`'s."""
    for names in (state["values"], state["versions"]):
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names):
            raise TypeError("a module's values and versions must be dicts with names")
    if not all(is_version(entry) for entry in state["versions"].values()):
        raise TypeError("a version must be a dict with a whole number")


def plan_module(model: nn.Module, name: str, state: Any, fit: Fit) -> tuple[Callable[[], object], dict[str, str]]:
    """Check that a state fits a module; return what changes the module, and its own names by the saved ones."""
    own = model.state_dict()
    chosen = {there: value for there, value in state["values"].items() if there.startswith(fit.prefix)}
    if state["values"] and not chosen:
        raise CheckpointMismatchError(
            f"load: No name in the checkpoint begins with the prefix {fit.prefix!r}; they are "
            f"{', '.join(list(state['values'])[:3])}, … Pass what stands before the names of the part to load."
        )
    prefix = fit.prefix or find_prefix(chosen, own)
    new_name = {there: there.removeprefix(prefix) if fit.prefix else strip_prefix(there, prefix) for there in chosen}
    saved_names = {new: there for there, new in new_name.items()}
    saved = _with_tied(rename(chosen, new_name.__getitem__), own)
    own_names = {clean: raw for raw, clean in clean_names(model, own).items()}
    pairs = {there: own_names[here] for there, here in match_names(saved, own_names).items()}
    versions = _own_versions(model, own, state["versions"], prefix)
    left_out = _check_names(name, saved, own, pairs, fit, _made_by_torch(model, versions, set(pairs.values())))
    loaded = OrderedDict((pairs.get(n, n), _outliving(n, value)) for n, value in saved.items() if n not in left_out)
    # torch reads the versions from this attribute: Module.load_state_dict.
    loaded._metadata = versions  # type: ignore[attr-defined]
    strict = fit.strict and not left_out
    named = {saved_names.get(there, there): here for there, here in pairs.items()}
    return lambda: model.load_state_dict(loaded, strict=strict), named


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


def _own_versions(
    model: nn.Module, own: Any, saved: Mapping[str, Any], prefix: str
) -> "OrderedDict[str, dict[str, Any]]":
    clean = name_cleaner(model)
    # Versions in foreign files stand under paths without wrappers' segments, their tensors need not.
    found = {bare_key(path): version for path, version in saved.items()} | dict(saved)
    versions = OrderedDict()
    for path in getattr(own, "_metadata", {}):
        there = clean(f"{path}.")
        version = found.get(f"{prefix}{there}".rstrip("."), found.get(bare_key(f"{prefix}{there}".rstrip("."))))
        if version is not None:
            versions[path] = dict(version)
    return versions


def _made_by_torch(model: nn.Module, versions: Mapping[str, Any], found: Set[str]) -> set[str]:
    """Name the counters that BatchNorm's states of before its version 2 lack, in PyTorch 0.4.0: it keeps its own."""
    norms = [path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, NormBase)]
    old = [path for path in norms if (versions.get(path, {}).get("version") or 1) < 2]
    stems = [f"{path}.".lstrip(".") for path in old]
    return {f"{stem}num_batches_tracked" for stem in stems if f"{stem}running_mean" in found}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module where everygpu.DataParallel wraps it: that is whose state it gives."""
    return keys.unwrap(model) if getattr(type(model), "wraps_a_module", False) else model


def name_cleaner(model: nn.Module) -> Callable[[str], str]:
    """Return a function that takes the prefixes of wrappers out of names in ``model.state_dict()``."""
    # The longest first, so that what is left of a name still begins as the shorter ones expect.
    wrapped = sorted(_wrapped_prefixes(model, ""), key=lambda pair: -len(pair[0] + pair[1]))

    def clean(name: str) -> str:
        for outer, inner in wrapped:
            if name.startswith(outer + inner):
                name = outer + name[len(outer + inner) :]
        return name

    return clean


def clean_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Map each name in a module's state to the name it is stored under; all different."""
    clean = name_cleaner(model)
    cleaned = {name: clean(name) for name in names}
    # A wrapper with state of its own may share a name with the module inside.
    is_clear = len(set(cleaned.values())) == len(cleaned)
    return cleaned if is_clear else {name: name for name in names}


def match_names(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Pair names that are equal; then those that are without wrappers' segments, where that leaves one choice."""
    saved, wanted = list(saved), set(wanted)
    pairs = {name: name for name in saved if name in wanted}
    free_wanted = _by_bare_name(wanted - pairs.keys())
    for bare, names in _by_bare_name(name for name in saved if name not in pairs).items():
        partners = free_wanted.get(bare, [])
        if len(names) == len(partners) == 1:
            pairs[names[0]] = partners[0]
    return pairs


def find_prefix(state: Mapping[str, Any], expected: Collection[str]) -> str:
    """Find the prefix under which a state has more than half of the expected names, as Lightning's ``model.``.

    Segments of wrappers count for nothing. Empty where the names fit at least as well without.
    """
    wanted = {bare_key(name) for name in expected}
    names = [bare_key(name) for name in state]
    starts = ((name, [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]) for name in names)
    fits = Counter(name[:i] for name, where in starts for i in where if name[i:] in wanted)
    best = max(fits.values(), default=0)
    leading = sorted(prefix for prefix, count in fits.items() if count == best)
    if 2 * best <= len(wanted) or fits[""] == best:
        return ""
    if len(leading) > 1:
        raise CheckpointMismatchError(
            f"load: The model's names stand under more than one prefix: {', '.join(leading)}, with {best} names each. "
            f"Choose one prefix, for instance prefix={leading[0]!r}."
        )
    return leading[0]


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


def describe_mismatch(missing: list[str], unexpected: list[str], shapes: Mapping[str, str]) -> str:
    """List names that don't fit, with the nearest name on the other side; each line begins with a line break."""

    def with_nearest(name: str, others: list[str]) -> str:
        near = get_close_matches(name, others, n=1)
        return f"{name} (nearest: {near[0]})" if near else name

    lines = []
    for title, num, words in (
        ("missing in the checkpoint", len(missing), [with_nearest(n, unexpected) for n in missing[:_MAX_LISTED]]),
        ("unknown to the target", len(unexpected), [with_nearest(n, missing) for n in unexpected[:_MAX_LISTED]]),
        ("of another shape", len(shapes), [f"{name}: {what}" for name, what in list(shapes.items())[:_MAX_LISTED]]),
    ):
        lines += [f"{title} ({num}):", *(f"  {line}" for line in words)] if num else []
        lines += [f"  … and {num - _MAX_LISTED} more"] if num > _MAX_LISTED else []
    return "".join(f"\n  {line}" for line in lines)


def _wrapped_prefixes(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (what stands before, prefix to remove) for every wrapper inside."""
    module = unwrap(module)
    inner = keys.wrapped_child(module)
    for name, child in module._modules.items():
        if child is not None:
            if name == inner:
                yield prefix, f"{name}."
            yield from _wrapped_prefixes(child, f"{prefix}{name}.")


def _by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    bare: dict[str, list[str]] = {}
    for name in names:
        bare.setdefault(bare_key(name), []).append(name)
    return bare
