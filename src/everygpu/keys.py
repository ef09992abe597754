"""Names of parameters with and without what wrappers put in front."""

from collections import OrderedDict
from collections.abc import Collection, Mapping
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


def align_keys(state: Mapping[str, Any], expected: Collection[str]) -> dict[str, Any]:
    """Rename keys that differ from the expected ones only by wrappers' segments.

    A model may have a submodule that is really called ``module``: a key that is expected as it stands is
    left alone, and one whose bare form two expected keys share is too.

    Args:
        state: A state dict, under any prefix.
        expected: The keys of the target.
    Returns:
        The same values; keys that match nothing, or what another key has matched, keep their names.
    """
    targets: dict[str, str | None] = {}
    for key in expected:
        targets[bare_key(key)] = None if bare_key(key) in targets else key
    names = set(expected)
    aligned: dict[str, Any] = OrderedDict((key, value) for key, value in state.items() if key in names)
    for key, value in state.items():
        target = targets.get(bare_key(key)) or key
        aligned.setdefault(key if target in aligned else target, value)
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
    """Tell whether calling a module runs what torch.compile made of it, wrapped or in place."""
    return compiled_original(module) is not None or module._compiled_call_impl is not None
