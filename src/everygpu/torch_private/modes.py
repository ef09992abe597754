"""Function modes, dispatch modes and default devices, which are kept per thread."""

import functools
import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext as _DeviceContext
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

DeviceContext = _DeviceContext
"""The function mode of ``with torch.device(...)`` and ``torch.set_default_device``, whose class isn't exported."""

device_constructors: Any = _device_constructors
"""Returns the functions to which ``DeviceContext`` gives its device, where they are called without one."""

push_function_mode: Any = _push_mode
"""Enter a function mode without its ``__enter__``: a mode that was entered in one thread is carried to another."""

pop_function_mode: Any = _pop_mode
"""Leave the innermost function mode without its ``__exit__``."""

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""The context manager in which subclasses' ``__torch_function__`` isn't called, as "Extending PyTorch" documents it."""


def function_modes() -> list[Any]:
    """Return the function modes that are entered now, the outermost first."""
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def num_dispatch_modes() -> int:
    """Count the ``TorchDispatchMode``s that are entered now."""
    return torch._C._len_torch_dispatch_stack()


def is_tracing() -> bool:
    """Tell whether the mode of fake tensors, or of ``make_fx``'s proxies, is entered now: they have a place each."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACING_MODES
    )


_TRACING_MODES = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)

TorchDispatchMode = _TorchDispatchMode
"""Sees every operation of this thread that reaches torch's dispatcher; "Extending PyTorch" documents it."""

without_dispatch_modes = _disable_current_modes
"""The context manager in which no ``TorchDispatchMode`` is entered; tensor subclasses are dispatched as before."""


def reading_lazy_values() -> AbstractContextManager[None]:
    """Have operations conjugate, negate and fill in what is marked so, as ``linalg.pinv`` marks its own tensors.

    Below ``__torch_dispatch__`` torch leaves these keys out, and reads raw memory.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(include, exclude - _LAZY)
    return guard


_LAZY_KEYS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)
_LAZY = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, _LAZY_KEYS))
