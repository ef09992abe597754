"""A module's state by name: taken without the prefixes of wrappers, put into a module of the same or other names.

``torch.compile`` adds ``_orig_mod.``, DataParallel and DistributedDataParallel add ``module.``. They are
removed where the wrapper that adds them is found, at the top or inside, so that a user's own submodule
called ``module`` keeps its name.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

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
    fits = Counter(prefix for name in state for prefix in _prefixes(bare_key(name), wanted))
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
    differing = {name: f"{name}: {what}" for name, what in shapes.items()}
    lines = [
        *_listed("missing in the checkpoint", missing, lambda name: _with_nearest(name, unexpected)),
        *_listed("unknown to the target", unexpected, lambda name: _with_nearest(name, missing)),
        *_listed("of another shape", list(differing), differing.__getitem__),
    ]
    return "".join(f"\n  {line}" for line in lines)


def _prefixes(name: str, wanted: Collection[str]) -> list[str]:
    starts = [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]
    return [name[:start] for start in starts if name[start:] in wanted]


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


def _with_nearest(name: str, others: list[str]) -> str:
    near = get_close_matches(name, others, n=1)
    return f"{name} (nearest: {near[0]})" if near else name


def _listed(title: str, names: list[str], describe: Callable[[str], str]) -> list[str]:
    if not names:
        return []
    rest = len(names) - _MAX_LISTED
    more = [f"  … and {rest} more"] if rest > 0 else []
    return [f"{title} ({len(names)}):", *(f"  {describe(name)}" for name in names[:_MAX_LISTED]), *more]
