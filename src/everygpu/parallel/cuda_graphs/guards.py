"""Guards on module structure, attributes and tensors, and on torch's settings: what a recording was made from."""

import functools
import operator
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from everygpu.parallel.buckets import version_of
from everygpu.parallel.replicas.module_tree import ModuleTree, has_hooks, is_dense
from everygpu.parallel.replicas.remap import cell_contents
from everygpu.parallel.replicas.snapshot import Contents, Search, Snapshot, is_open
from everygpu.torch_private.core import (
    DeviceContext,
    caches_parametrizations,
    function_modes,
    num_dispatch_modes,
    top_saved_tensor_hooks,
)

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
"""A module's tables of hooks that its calls run."""

_WRITES = 6
"""Where a guard key has the versions of frozen parameters."""

_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)

_read_global_hooks = operator.attrgetter(*_GLOBAL_HOOKS)

_read_backends = operator.attrgetter(
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
)
"""Settings in ``torch.backends``; precisions by the one way to ask that never raises, whichever way they were set."""
_read_attention = operator.attrgetter(
    "flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"
)
_read_hooks = [operator.attrgetter(name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]


class ModuleGuards:
    """Guards on module structure, attributes and tensors, checked in every step.

    Args:
        roots: The modules, with all below them, as they are now.
        is_proven: A proof guards all that forward reads, attributes too, and launches send frozen parameters: here it
            is tensors alone, which a proof knows by their objects.
    """

    def __init__(self, roots: Sequence[nn.Module], *, is_proven: bool = False) -> None:
        self._roots = list(roots)
        self._layouts = [ModuleTree(root) for root in roots]
        self._tensors = [t for layout in self._layouts for t in layout.tensors]
        # An LSTM has a list of its parameters: what they are is compared here.
        known: list[nn.Module | Tensor] = [*self._tensors, *(m for layout in self._layouts for m in layout.modules)]
        layouts = [] if is_proven else self._layouts
        self._snapshots = [Snapshot(layout.modules, known, is_strict=True) for layout in layouts]
        for snapshot in self._snapshots:
            snapshot.changed()
        self._dense = [t for t in self._tensors if is_dense(t)]
        frozen = [t for t in self._tensors if isinstance(t, nn.Parameter) and not t.requires_grad]
        self._fixed = [] if is_proven else frozen
        attributes = (v for layout in layouts for m in layout.modules for v in vars(m).values())
        self._objects = list({id(v): v for v in attributes if is_open(v)}.values())
        self._contents = _contents_of_objects(self._objects, known)
        self._key = self._guard_key()
        self._addresses = self._find_addresses()

    def is_current(self, roots: Sequence[nn.Module], *, addresses: bool = True) -> bool:
        """Tell whether everything is as it was; with ``addresses``, tensors are at the same ones, too."""
        return (
            len(roots) == len(self._roots)
            and all(map(operator.is_, roots, self._roots))
            and all(layout.is_same() for layout in self._layouts)
            and all(snapshot.is_same() for snapshot in self._snapshots)
            and self._contents.is_same()
            and self._guard_key() == self._key
            and (not addresses or self._find_addresses() == self._addresses)
        )

    def note_addresses(self) -> None:
        """Compare with the tensors' addresses of now from now on."""
        self._addresses = self._find_addresses()

    def _find_addresses(self) -> list[int]:
        return [t.data_ptr() for t in self._dense]

    def find_volatile(self) -> str | None:
        """Name a module whose attributes can't be compared with what they were."""
        for root, layout, snapshot in zip(self._roots, self._layouts, self._snapshots):
            for i, attribute in snapshot.volatile.items():
                m = layout.modules[i]
                name = next((n for n, other in root.named_modules() if other is m), "")
                which = f"{type(m).__name__} {name!r}" if name else type(m).__name__
                return f"{which} has an attribute that may change unseen, such as a list of tensors: {attribute}"
        return None

    def find_written(self) -> str | None:
        """Name a frozen parameter that was written since, or is in other memory; None where there is none."""
        then = dict(zip(map(id, self._dense), self._addresses))
        written = {id(t) for t, version in zip(self._fixed, self._key[_WRITES]) if version_of(t) != version}
        for root in self._roots:
            for name, p in root.named_parameters():
                if not p.requires_grad and (id(p) in written or then.get(id(p), p.data_ptr()) != p.data_ptr()):
                    return f"frozen parameter {name} is written between steps, and recorded ones don't send it"
        return None

    def _guard_key(self) -> tuple[list[Any], ...]:
        """Return what may change in a tensor that stays the same object; and writes to tensors that aren't trained,
        which replicas are sent outside recordings.
        """
        return (
            [t.shape for t in self._dense],
            [t.stride() for t in self._dense],
            [t.dtype for t in self._dense],
            [t.requires_grad for t in self._tensors],
            *(list(map(bool, map(read, self._tensors))) for read in _read_hooks),
            [version_of(t) for t in self._fixed],
            [_identity_of(v) for o in self._objects for v in vars(o).values()],
        )


def _contents_of_objects(objects: Sequence[Any], known: Sequence[nn.Module | Tensor]) -> Contents:
    """Record containers within objects' attributes, such as a configuration's dicts."""
    search = Search({id(x): x for x in known}, is_strict=True)
    for value in objects:
        for name, held in vars(value).items():
            search.add(name, held)
    return Contents(search.containers, search.functions, [])


def torch_settings() -> tuple[Any, ...]:
    """Return torch's settings that a recording has baked in."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *map(torch.is_autocast_enabled, ("cuda", "cpu")),
        *map(torch.get_autocast_dtype, ("cuda", "cpu")),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        *_read_backends(torch.backends),
        *(read() for read in _read_attention(torch.backends.cuda)),
        torch.is_anomaly_enabled(),
        [str(m.device) if isinstance(m, DeviceContext) else id(m) for m in function_modes()],
        num_dispatch_modes(),
        top_saved_tensor_hooks() is None,
        *map(len, _read_global_hooks(torch_module)),
    )


def is_observed() -> bool:
    """Tell whether modes, hooks or anomaly detection observe every operation: a launch would bypass them."""
    return (
        any(not isinstance(m, DeviceContext) for m in function_modes())
        or num_dispatch_modes() > 0
        or top_saved_tensor_hooks() is not None
        or torch.is_anomaly_enabled()
        or caches_parametrizations()
    )


def find_hooks(roots: Sequence[nn.Module], *, are_proven: bool = False) -> str | None:
    """Say where there is Python code that a launch wouldn't run; hooks of forward may be part of what is proven."""
    tables = [table for table in HOOKS if not are_proven or table not in FORWARD_HOOKS]
    if any(vars(torch_module)[table] for table in _GLOBAL_HOOKS):
        return "there are hooks on all modules, which a recording wouldn't call"
    for root in roots:
        for name, m in root.named_modules():
            if any(getattr(m, table, None) for table in tables):
                return f"module {name or type(m).__name__!r} has hooks, which a recording wouldn't call"
        for name, p in root.named_parameters():
            if has_hooks(p):
                return f"parameter {name} has hooks, which a recording wouldn't call"
    return None


def referents(function: Any) -> tuple[Any, ...]:
    """Return what a function's result depends on besides its arguments, one level deep, to be compared later: numbers
    and strings, and the identity of everything else; nothing for what can't be looked into.
    """
    return tuple(_identity_of(v) for v in values_of(function))


def values_of(function: Any) -> list[Any]:
    """List what a function refers to, one level deep: its globals, defaults and closure, a bound method's attributes,
    what a partial has, and the attributes of another object that can be called. Modules are looked at elsewhere.
    """
    found: list[Any] = []
    if isinstance(function, nn.Module):
        return found
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), function.func, *values_of(function.func)]
    if isinstance(function, types.MethodType):
        found += [function.__self__, *_attributes(function.__self__)]
        function = function.__func__
    elif callable(function) and not isinstance(function, types.FunctionType):
        found += _attributes(function)
        function = type(function).__call__
    if isinstance(function, types.FunctionType):
        found += [function.__globals__.get(n) for n in function.__code__.co_names]
        found += [cell_contents(cell) for cell in function.__closure__ or ()]
        found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return found


def _attributes(value: Any) -> list[Any]:
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _identity_of(value: Any) -> Any:
    if type(value) is Tensor and is_dense(value):
        # What is on the host goes into a recording as a number.
        written = version_of(value) if value.device.type == "cpu" else 0
        return id(value), value.data_ptr(), written, value.requires_grad
    return (type(value), value) if isinstance(value, (int, float, str, bool)) else id(value)  # equal ones are the same
