"""Guards on module structure, attributes and tensors, and on torch's settings: what a capture was made from."""

import functools
import operator
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from everygpu import tree
from everygpu.parallel.buckets import version_of
from everygpu.parallel.cuda_graphs.executed_code import ExecutedCode
from everygpu.parallel.cuda_graphs.reached_state import ReachedState
from everygpu.parallel.replicas.module_tree import ModuleTree, has_hooks, is_dense
from everygpu.parallel.replicas.remap import cell_contents
from everygpu.parallel.replicas.snapshot import Snapshot
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
    """Guards on modules, their tensors and all Python state that steps reach, checked in every step.

    Steps begin at the modules in ``roots`` and at ``others``, such as a loss, and have run ``code`` so far. That is
    None where a proof guards all that forward reads, and replays send frozen parameters: here it is tensors alone,
    which a proof knows by their objects.
    """

    def __init__(self, roots: Sequence[nn.Module], others: Sequence[Any], code: ExecutedCode | None) -> None:
        self._roots, self._others = list(roots), list(others)
        self._layouts = [ModuleTree(root) for root in roots]
        self._tensors = [t for layout in self._layouts for t in layout.tensors]
        self._code = code
        self.walk()
        self._dense = [t for t in self._tensors if is_dense(t)]
        frozen = [t for t in self._tensors if isinstance(t, nn.Parameter) and not t.requires_grad]
        self._fixed = [] if code is None else frozen
        self._key = self._guard_key()
        self._addresses = self._find_addresses()

    def walk(self) -> None:
        """Hold all that is reached now, by the code that is known now."""
        code = self._code
        self.state = None if code is None else ReachedState([*self._others, *self._roots], self._tensors, code)
        self.version = 0 if code is None else code.version
        seen = set() if self.state is None else set(map(id, self.state.modules))
        # A wrapper's module, for one, is looked into, and the wrapper isn't.
        self._unseen_layouts = [layout for layout in self._layouts if not seen.issuperset(map(id, layout.modules))]

    def is_current(self, roots: Sequence[nn.Module], others: Sequence[Any], *, addresses: bool = True) -> bool:
        """Whether everything is as it was; with ``addresses``, tensors also have the same addresses."""
        return (
            tree.are_same(roots, self._roots)
            and tree.are_same(others, self._others)
            and all(layout.is_same() for layout in self._unseen_layouts)
            and (self.state is None or self.state.is_same())
            and self._guard_key() == self._key
            and (not addresses or self._find_addresses() == self._addresses)
        )

    def note_addresses(self) -> None:
        """Compare with the tensors' addresses of now from now on."""
        self._addresses = self._find_addresses()

    def _find_addresses(self) -> list[int]:
        return [t.data_ptr() for t in self._dense]

    def find_copied(self) -> str | None:
        """Name a module with a tensor that isn't registered: each forward copies it to replicas, but no replay does."""
        for root, layout in zip(self._roots, self._layouts):
            snapshot = Snapshot(layout.modules, self._tensors)
            snapshot.changed()
            for i, attribute in snapshot.volatile.items():
                name = next((n for n, m in root.named_modules() if m is layout.modules[i]), "")
                which = f"{type(layout.modules[i]).__name__} {name!r}" if name else type(layout.modules[i]).__name__
                return f"{which} has a tensor that isn't registered, which each replica has a copy of: {attribute}"
        return None

    def find_change(self) -> str | None:
        """Name what isn't as it was."""
        return None if self.state is None else self.state.find_change()

    def find_written(self) -> str | None:
        """Name a frozen parameter that was written since, or is in other memory; None if no parameter was."""
        then = dict(zip(map(id, self._dense), self._addresses))
        written = {id(t) for t, version in zip(self._fixed, self._key[_WRITES]) if version_of(t) != version}
        for root in self._roots:
            for name, p in root.named_parameters():
                if not p.requires_grad and (id(p) in written or then.get(id(p), p.data_ptr()) != p.data_ptr()):
                    return f"frozen parameter {name} is written between steps, and captured ones don't send it"
        return None

    def _guard_key(self) -> tuple[list[Any], ...]:
        """Return what may change in a tensor that stays the same object; and writes to tensors that aren't trained,
        which replicas are sent outside captures.
        """
        return (
            [t.shape for t in self._dense],
            [t.stride() for t in self._dense],
            [t.dtype for t in self._dense],
            [t.requires_grad for t in self._tensors],
            *(list(map(bool, map(read, self._tensors))) for read in _read_hooks),
            [version_of(t) for t in self._fixed],
        )


def torch_settings() -> tuple[Any, ...]:
    """Return torch's settings that a capture has baked in."""
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
        [str(m.device) if isinstance(m, DeviceContext) else m for m in function_modes()],
        num_dispatch_modes(),
        top_saved_tensor_hooks() is None,
        *map(len, _read_global_hooks(torch_module)),
    )


def is_observed() -> bool:
    """Whether modes, hooks or anomaly detection observe every operation: a replay would bypass them."""
    return (
        any(not isinstance(m, DeviceContext) for m in function_modes())
        or num_dispatch_modes() > 0
        or top_saved_tensor_hooks() is not None
        or torch.is_anomaly_enabled()
        or caches_parametrizations()
    )


def find_hooks(roots: Sequence[nn.Module], *, are_proven: bool = False, others: Sequence[nn.Module] = ()) -> str | None:
    """Say where there is Python code that a replay wouldn't run; hooks of forward may be part of what is proven."""
    tables = [table for table in HOOKS if not are_proven or table not in FORWARD_HOOKS]
    if any(vars(torch_module)[table] for table in _GLOBAL_HOOKS):
        return "there are hooks on all modules, which a capture wouldn't call"
    for name, m in (*(pair for root in roots for pair in root.named_modules()), *(("", m) for m in others)):
        if any(getattr(m, table, None) for table in tables):
            return f"module {name or type(m).__name__!r} has hooks, which a capture wouldn't call"
    hooked = next((name for root in roots for name, p in root.named_parameters() if has_hooks(p)), None)
    return None if hooked is None else f"parameter {hooked} has hooks, which a capture wouldn't call"


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
