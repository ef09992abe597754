"""What can't go through several replicas: transforms and tracers of torch, which know one thread and one device."""

import torch

from everygpu.errors import CallError
from everygpu.parallel.compiler.eval_frame import left_to_run
from everygpu.torch_private.core import are_transforms_active, is_transforming


def check_transforms() -> None:
    """Refuse a forward on several devices within a transform of ``torch.func``, in forward mode, or in a trace."""
    found = _find_transform()
    if found is not None:
        what, example = found
        raise CallError(
            f"DataParallel: {what} needs a module on one device, got a DataParallel of several replicas. Pass "
            f"the module itself, as in {example}."
        )


@left_to_run  # torch.compile before torch 2.13 takes is_exporting() for true
def _find_transform() -> tuple[str, str] | None:
    if are_transforms_active():
        return "a transform of torch.func, such as vmap or grad,", "torch.func.vmap(model.module)(x)"
    if is_transforming():
        return "forward-mode differentiation", "torch.func.jvp(model.module, (x,), (v,))"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace", "torch.jit.trace(model.module, x)"
    if torch.compiler.is_exporting():
        return "torch.export", "torch.export.export(model.module, (x,))"
    return None
