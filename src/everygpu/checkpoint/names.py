"""Names in a module's state: without the prefixes of wrappers, and matched with those of a target.

``torch.compile`` adds ``_orig_mod.``, DataParallel and DistributedDataParallel add ``module.``. They are
removed where the wrapper that adds them is found, at the top or inside, so that a user's own submodule
called ``module`` keeps its name.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn

from everygpu import keys
from everygpu.errors import CheckpointMismatchError
from everygpu.keys import bare_key

EXTRA_STATE = "_extra_state"
"""What ``Module.get_extra_state`` returned is saved under a name that ends so."""

_MAX_LISTED = 20


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
