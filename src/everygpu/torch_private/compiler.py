"""torch's compiler: Dynamo's frames, AOTAutograd's settings, Inductor's graphs; imported at use, as it is slow."""

from types import CodeType
from typing import Any

import torch

_eval_frame: Any = torch._C._dynamo.eval_frame


def skip_code(code: CodeType, *, with_calls: bool) -> None:
    """Have Dynamo leave a function's code as it is, perhaps with all it calls; ``torch.compiler.disable`` wraps it."""
    action = _eval_frame._FrameAction
    calls = action.SKIP if with_calls else action.DEFAULT
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(action.SKIP, calls))


InductorWrapper: Any = torch._TorchCompileInductorWrapper
"""The backend that ``torch.compile`` makes of ``mode`` and ``options``, its ``config``."""


def is_scripted(func: Any) -> bool:
    """Tell whether a function was made by ``torch.jit.script``."""
    return isinstance(func, (torch._C.ScriptFunction, torch._C.ScriptMethod))


def tracing_context() -> Any:
    """Return the running compilation's ``fw_metadata``, ``guards_context`` and ``ddp_optimizer_ctx``, or None."""
    return torch._guards.TracingContext.try_get()


def functorch_config() -> Any:
    """Return AOTAutograd's settings: ``enable_autograd_cache`` and ``force_non_lazy_backward_lowering``."""
    from torch._functorch import config

    return config


def inductor_config() -> Any:
    """Return Inductor's settings: ``triton.cudagraphs`` and whatever ``torch.compile(options=...)`` names."""
    from torch._inductor import config

    return config


def compile_fx(graph: Any, inputs: list[Any], **kwargs: Any) -> Any:
    """Compile one of Dynamo's graphs as Inductor does; ``inner_compile`` and ``config_patches`` have no public way."""
    from torch._inductor.compile_fx import compile_fx as compile_graph

    return compile_graph(graph, inputs, **kwargs)


def compile_fx_inner(graph: Any, inputs: Any, **kwargs: Any) -> Any:
    """Compile a forward or backward graph; returns a ``CompiledFxGraph``, whose fields ``inductor_backend`` reads."""
    from torch._inductor import compile_fx

    return compile_fx.compile_fx_inner(graph, inputs, **kwargs)


def write_code(source: str) -> str:
    """Put generated code into Inductor's cache on disk; return its key there."""
    from torch._inductor.codecache import PyCodeCache

    return PyCodeCache.write(source)[0]


def make_boxes(index: int) -> dict[str, Any]:
    """Make what ``CompiledFxGraph.post_compile`` takes: no CUDA graphs, and the GPU."""
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    return {"cudagraphs": BoxedBool(False), "boxed_forward_device_index": BoxedDeviceIndex(index)}
