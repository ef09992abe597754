"""Compile a graph on one GPU and run it on all GPUs of its kind.

Tracing, optimizing and generating code takes torch's compiler tens of seconds for a large model; what comes out names
its GPU in a few places. So for each further GPU the generated source is rewritten and loaded again; its kernels are the
same, and found in Triton's cache on disk.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.compiler.load_graph import load_version, unsupported_reason
from everygpu.torch_private.compiler import (
    InductorWrapper,
    compile_fx,
    compile_fx_inner,
    functorch_config,
    tracing_context,
)

logger = logging.getLogger("everygpu")

Backend = Callable[[Any, list[Any]], Callable[..., Any]]
"""From Dynamo's graph and example inputs to what runs it."""

Run = Callable[[list[Any]], Any]


class MultiDeviceGraph:
    """What Dynamo's graph was compiled to: forward, and backward by autograd."""

    def __init__(self, function: Callable[..., Any], parts: "Sequence[GraphPart | None]") -> None:
        self._function = function
        self._parts = parts

    def __call__(self, *inputs: Any) -> Any:
        return self._function(*inputs)

    def serves(self, device: torch.device) -> bool:
        """Whether it may be given inputs on this device."""
        return device.type == "cuda" and all(part is not None and part.serves(device.index) for part in self._parts)


class GraphPart:
    """A forward or backward graph, with a version of its code for each GPU it has run on, made by ``load``.

    ``home`` is the GPU it was compiled for; ``run`` empties its list of inputs.
    """

    def __init__(self, home: int, run: Run, load: Callable[[int], Run]) -> None:
        self._home = home
        self._load: Callable[[int], Run] | None = load
        self._loading = threading.Lock()
        self._versions = {home: run}

    def serves(self, index: int) -> bool:
        """Whether it runs on a GPU: that it was compiled for, or one of the same kind."""
        if index not in self._versions and self._load is not None and _is_same_kind(self._home, index):
            try:
                self._version(index)
            except Exception:  # torch's internals may have changed: the graph is compiled for that GPU instead
                logger.warning(
                    "DataParallel: code compiled for cuda:%d can't be loaded for others", self._home, exc_info=True
                )
                self._load = None
        return index in self._versions

    def __call__(self, inputs: list[Any]) -> Any:
        return self._version(device_index_of(inputs))(inputs)

    def _version(self, index: int) -> Run:
        found = self._versions.get(index)
        if found is None:
            with self._loading:
                if index not in self._versions and self._load is not None:
                    self._versions[index] = self._load(index)
                found = self._versions[index]
        return found


class InductorBackend:
    """A backend for ``torch.compile``: Inductor without CUDA graphs; what it makes runs on every GPU of a kind."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = {**options, "triton.cudagraphs": False}
        self._reasons: set[str] = set()

    def __call__(self, graph: Any, example_inputs: list[Any]) -> MultiDeviceGraph:
        parts: list[GraphPart | None] = []

        def compile_part(*args: Any, **kwargs: Any) -> Any:
            return self._compile_part(parts, *args, **kwargs)

        # From its cache of whole compilations torch would answer without asking compile_part. Left for later, backward
        # would be compiled by autograd's threads, by one for each GPU.
        with functorch_config().patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
            function = compile_fx(graph, example_inputs, inner_compile=compile_part, config_patches=self._options)
        return MultiDeviceGraph(function, parts)

    def _compile_part(
        self, parts: list[GraphPart | None], graph: Any, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        """Compile a forward or backward graph as torch does, and have it run on the GPU of its inputs."""
        if kwargs.get("is_backward"):
            _keep_saved_tensors()
        compiled: Any = compile_fx_inner(graph, example_inputs, **kwargs)
        if all(node.op in ("placeholder", "output") for node in graph.graph.nodes):
            return compiled  # does nothing, on any device
        reason = unsupported_reason(compiled, example_inputs)
        if reason is not None:
            if "cuda" in getattr(compiled, "device_types", ("cuda",)) and reason not in self._reasons:
                self._reasons.add(reason)
                logger.info("DataParallel: each GPU is compiled for by itself: %s", reason)
            parts.append(None)
        else:
            home, run = next(iter(compiled.device_idxs)), compiled.current_callable
            part = GraphPart(home, run, lambda index: load_version(compiled, index, self._options, kwargs))
            parts.append(part)
            compiled.current_callable = part
        return compiled


def compiling_once(backend: Backend) -> Backend:
    """Replace torch's backend by everygpu's, with the same options, except for CUDA graphs; others stay."""
    return InductorBackend(backend.config) if isinstance(backend, InductorWrapper) else backend


def backend_of(context: Any) -> Backend | None:
    """Find the backend that a user's ``torch.compile`` was given; None if torch doesn't say."""
    found: Any = getattr(context, "callback", None)
    while hasattr(found, "_torchdynamo_orig_backend"):
        found = found._torchdynamo_orig_backend
    return found if callable(found) else None


def _keep_saved_tensors() -> None:
    """Keep backward from freeing what forward saved, for ``backward(retain_graph=True)``.

    torch decides on it at the first backward, where it compiles that. All readers of the list of what backward may
    write share one object, so it is cleared in place.
    """
    metadata = getattr(tracing_context(), "fw_metadata", None)
    writable = getattr(metadata, "bw_donated_idxs", None)
    if writable:
        writable.clear()


def device_index_of(inputs: Sequence[Any]) -> int:
    """Find the GPU that a graph is to run on: that of its first input on one, or the current one."""
    for x in inputs:
        if isinstance(x, Tensor) and x.device.type == "cuda":
            return x.device.index
    return torch.cuda.current_device()


def _is_same_kind(a: int, b: int) -> bool:
    """Whether two GPUs run the same code: kernels are laid out for a number of multiprocessors."""
    if a == b:
        return True
    one, other = torch.cuda.get_device_properties(a), torch.cuda.get_device_properties(b)
    return all(
        getattr(one, name) == getattr(other, name) for name in ("name", "major", "minor", "multi_processor_count")
    )
