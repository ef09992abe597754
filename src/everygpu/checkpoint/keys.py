"""Names in a module's state without the prefixes that wrappers put into them.

``torch.compile`` adds ``_orig_mod.``, DataParallel and DistributedDataParallel add ``module.``. They are
removed where the wrapper that adds them is found, at the top or inside, so that a user's own submodule
called ``module`` keeps its name.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches

from torch import nn

from everygpu import keys

EXTRA_STATE = "_extra_state"
"""What ``Module.get_extra_state`` returned is saved under a name that ends so."""

_MAX_LISTED = 20


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module where everygpu.DataParallel wraps it: that is whose state it gives."""
    return keys.unwrap(model) if _is_ours(model) else model


def name_cleaner(model: nn.Module) -> Callable[[str], str]:
    """Return a function that takes the prefixes of wrappers out of names in ``model.state_dict()``.

    Args:
        model: Bare, wrapped, compiled, or with such modules inside.
    """
    # The longest first, so that what is left of a name still begins as the shorter ones expect.
    wrapped = sorted(_wrapped_prefixes(model, ""), key=lambda pair: -len(pair[0] + pair[1]))

    def clean(name: str) -> str:
        for outer, inner in wrapped:
            if name.startswith(outer + inner):
                name = outer + name[len(outer + inner) :]
        return name

    return clean


def clean_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Map each name in a module's state to the name it is stored under.

    Args:
        model: The module the names come from.
        names: As ``model.state_dict()`` gives them.
    Returns:
        Stored names by the module's names; all different.
    """
    clean = name_cleaner(model)
    cleaned = {name: clean(name) for name in names}
    # A wrapper with state of its own may share a name with the module inside.
    is_clear = len(set(cleaned.values())) == len(cleaned)
    return cleaned if is_clear else {name: name for name in names}


def match_names(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Pair the names in a checkpoint with those of a target.

    Equal names belong together; of the rest, those that are equal without any ``module.``,
    ``_orig_mod.`` or ``_fsdp_wrapped_module.`` in them, where that leaves one choice.

    Args:
        saved: Names in the checkpoint.
        wanted: Names in the target.
    Returns:
        The target's names by the checkpoint's; those without a partner are left out.
    """
    saved, wanted = list(saved), set(wanted)
    pairs = {name: name for name in saved if name in wanted}
    free_saved = _by_bare_name(name for name in saved if name not in pairs)
    free_wanted = _by_bare_name(wanted - pairs.keys())
    for bare, names in free_saved.items():
        partners = free_wanted.get(bare, [])
        if len(names) == len(partners) == 1:
            pairs[names[0]] = partners[0]
    return pairs


def describe_mismatch(missing: list[str], unexpected: list[str], shapes: Mapping[str, str]) -> str:
    """List names that don't fit, with the nearest name on the other side.

    Args:
        missing: Names the target has and the checkpoint lacks.
        unexpected: Names the checkpoint has and the target lacks.
        shapes: What differs, by name.
    Returns:
        Lines, each beginning with a line break.
    """
    differing = {name: f"{name}: {what}" for name, what in shapes.items()}
    lines = [
        *_listed("missing in the checkpoint", missing, lambda name: _with_nearest(name, unexpected)),
        *_listed("unknown to the target", unexpected, lambda name: _with_nearest(name, missing)),
        *_listed("of another shape", list(differing), differing.__getitem__),
    ]
    return "".join(f"\n  {line}" for line in lines)


def _wrapped_prefixes(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (what stands before, prefix to remove) for every wrapper inside."""
    module = unwrap(module)
    inner = keys.wrapped_child(module)
    for name, child in module._modules.items():
        if child is None:
            continue
        if name == inner:
            yield prefix, f"{name}."
        yield from _wrapped_prefixes(child, f"{prefix}{name}.")


def _is_ours(module: nn.Module) -> bool:
    return bool(getattr(type(module), "wraps_a_module", False))


def _by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    bare: dict[str, list[str]] = {}
    for name in names:
        bare.setdefault(keys.bare_key(name), []).append(name)
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
