"""Names of parameters with and without what wrappers put in front."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

_WRAPPERS = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""By name: importing torch's compiler to compare classes takes a second."""

WRAPPER_SEGMENTS = frozenset(_WRAPPERS.values())
"""What DataParallel and DistributedDataParallel, torch.compile and FSDP add to a name."""


def bare_key(key: str) -> str:
    """Leave out the wrappers' segments: ``module.encoder._orig_mod.weight`` becomes ``encoder.weight``."""
    return ".".join(segment for segment in key.split(".") if segment not in WRAPPER_SEGMENTS)


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


def align_keys(state: Mapping[str, Any], expected: Collection[str]) -> dict[str, Any]:
    """Rename keys that differ from the expected ones only by wrappers' segments; the others keep their names."""
    pairs = match_names(state, expected)
    aligned: dict[str, Any] = OrderedDict((pairs.get(key, key), value) for key, value in state.items())
    if hasattr(state, "_metadata"):  # versions of modules, which torch needs to load old state dicts
        aligned._metadata = state._metadata  # type: ignore[attr-defined]
    return aligned


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module that the user wrote, inside torch.compile's and the data-parallel wrappers."""
    while (child := wrapped_child(module)) is not None:
        module = module.get_submodule(child)
    return module


def wrapped_child(module: nn.Module) -> str | None:
    """Name the child in which a wrapper holds the user's module; None when the module is no wrapper."""
    if getattr(type(module), "wraps_a_module", False):  # ours, which is defined above this file
        return "module"
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)


def compiled_original(module: nn.Module) -> nn.Module | None:
    """Return the module that torch.compile was given; None when this is not what it made."""
    return module.get_submodule("_orig_mod") if wrapped_child(module) == "_orig_mod" else None


def is_compiled(module: nn.Module) -> bool:
    """Whether calling a module runs code of torch.compile, wrapped or in place."""
    return compiled_original(module) is not None or module._compiled_call_impl is not None


def _by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    bare: dict[str, list[str]] = {}
    for name in names:
        bare.setdefault(bare_key(name), []).append(name)
    return bare
