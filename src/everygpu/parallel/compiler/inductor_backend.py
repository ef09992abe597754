"""Compile a graph on one GPU and run it on all GPUs of its kind.

Tracing, optimizing and generating code takes torch's compiler tens of seconds for a large model; what comes out names
its GPU in a few places. So for each further GPU the generated source is rewritten (``retarget.py``) and loaded again;
its kernels are the same, and found in Triton's cache on disk. CUDA graphs are made per GPU, by torch's own code.
"""

import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from everygpu import comm
from everygpu.parallel.compiler.retarget import retarget
from everygpu.parallel.compiler.split_graph import WHOLE, Backend, SplitPolicy, compile_pieces
from everygpu.parallel.cuda_graphs.deferred_linear import split_off
from everygpu.torch_private.compiler import (
    InductorWrapper,
    compile_fx,
    compile_fx_inner,
    cuda_graph_manager,
    functorch_config,
    inductor_config,
    is_replaying,
    make_boxes,
    restart_analysis,
    tracing_context,
    write_code,
)
from everygpu.torch_private.tensors import foreach_copy_

_capturing = threading.RLock()
"""Held by who may capture a CUDA graph, whichever model it is of: memory and streams then serve the capture only."""

logger = logging.getLogger("everygpu")


class InductorBackend:
    """A backend for ``torch.compile``: Inductor, with graphs that run on every GPU of a kind.

    Args:
        options: Inductor's, as in ``torch.compile(options=…)``.
        cuts: How graphs are cut.
    """

    def __init__(self, options: Mapping[str, Any], cuts: SplitPolicy = WHOLE) -> None:
        self._options = dict(options)
        self._cuts = cuts
        self._reasons: set[str] = set()

    @property
    def uses_cuda_graphs(self) -> bool:
        """Tell whether results may lie in memory that the next run writes."""
        return bool(self._options.get("triton.cudagraphs", inductor_config().triton.cudagraphs))

    def __call__(self, graph: Any, example_inputs: list[Any]) -> "MultiDeviceGraph":
        parts: list[_Part] = []

        def compile_part(*args: Any, **kwargs: Any) -> Any:
            return self._compile_part(parts, *args, **kwargs)

        def compile_graph(graph: Any, inputs: list[Any]) -> Any:
            return compile_fx(graph, inputs, inner_compile=compile_part, config_patches=self._options)

        # From its cache of whole compilations torch would answer without asking compile_part. Left for later, backward
        # would be compiled by autograd's threads, by one for each GPU.
        with functorch_config().patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
            cuts, function = self._cuts if torch.is_grad_enabled() else WHOLE, None
            put_behind = split_off(graph) if cuts.last_product else None
            if cuts.in_pieces:
                function = self._compile_pieces(graph, example_inputs, compile_graph)
            if function is None:
                parts.clear()
                function = compile_graph(graph, example_inputs)
        return MultiDeviceGraph(function if put_behind is None else put_behind(function), parts)

    def _compile_pieces(self, graph: Any, example_inputs: list[Any], compile_piece: Backend) -> Any:
        """Compile a graph in pieces; None where it is small or can't be cut."""
        try:
            return compile_pieces(graph, example_inputs, compile_piece)
        except restart_analysis():  # by which torch asks to be called again with another graph
            raise
        except Exception as error:  # noqa: BLE001 - such as operations of a higher order; where it is ours, it comes again
            self._tell(f"{type(error).__name__}: {error}", "graphs aren't cut, and gradients come all at once")
            return None

    def _compile_part(self, parts: "list[_Part]", graph: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Compile a forward or backward graph as torch does, and have it run on the GPU of its inputs."""
        wanted, is_backward = (bool(kwargs.get(name)) for name in ("cudagraphs", "is_backward"))
        if is_backward:
            _keep_saved_tensors()
        compiled: Any = compile_fx_inner(graph, example_inputs, **kwargs)
        if all(node.op in ("placeholder", "output") for node in graph.graph.nodes):
            return compiled  # does nothing, on any device
        reason = why_not(compiled, example_inputs)
        if reason is not None:
            if "cuda" in getattr(compiled, "device_types", ("cuda",)):
                self._tell(reason, "each GPU is compiled for by itself")
            parts.append(_Part(None))
        else:
            parts.append(
                _Part(
                    next(iter(compiled.device_idxs)),
                    compiled.current_callable,
                    lambda index: load_version(compiled, index, self._options, {**kwargs, "cudagraphs": wanted}),
                )
            )
            compiled.current_callable = parts[-1]
        if kwargs.get("cudagraphs") and hasattr(compiled, "current_callable"):  # torch has found out that they can be
            static = kwargs.get("static_input_idxs") or ()
            compiled.current_callable = _Captured(compiled.current_callable, static, copies_outputs=is_backward)
        return compiled

    def _tell(self, reason: str, consequence: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.info("DataParallel: %s: %s", consequence, reason)


def inductor(mode: str | None, cuts: SplitPolicy = WHOLE) -> InductorBackend:
    """Make the backend that ``torch.compile(mode=…)`` would take, compiling once for all GPUs.

    Args:
        mode: ``"reduce-overhead"`` for CUDA graphs; None for plain launches, as whoever captures graphs needs them.
        cuts: How graphs are cut.
    """
    wrapper = InductorWrapper(mode, None, False)
    return InductorBackend(wrapper.config, cuts)


def compiling_once(backend: Backend, *, cuda_graphs: bool, cuts: SplitPolicy = WHOLE) -> Backend:
    """Replace torch's own backend by ours with the same options, perhaps without CUDA graphs; others stay."""
    if not isinstance(backend, InductorWrapper):
        return backend
    options = backend.config if cuda_graphs else {**backend.config, "triton.cudagraphs": False}
    return InductorBackend(options, cuts)


class MultiDeviceGraph:
    """What Dynamo's graph was compiled to: forward, and backward by autograd."""

    def __init__(self, function: Callable[..., Any], parts: "Sequence[_Part]") -> None:
        self._function = function
        self._parts = parts

    def __call__(self, *inputs: Any) -> Any:
        return self._function(*inputs)

    def serves(self, device: torch.device) -> bool:
        """Tell whether it may be given inputs on this device."""
        return device.type == "cuda" and all(part.serves(device.index) for part in self._parts)


class _Part:
    """A forward or backward graph, with a version of its code for each GPU it has run on.

    Args:
        home: Index of the GPU it was compiled for; None when it is for no other.
        run: Takes a list of inputs, which it empties.
        load: Makes a version for another GPU.
    """

    def __init__(
        self,
        home: int | None,
        run: Callable[[list[Any]], Any] | None = None,
        load: "Callable[[int], Callable[[list[Any]], Any]] | None" = None,
    ) -> None:
        self._home = home
        self._load = load
        self._loading = threading.Lock()
        self._versions: dict[int, Callable[[list[Any]], Any]] = {} if home is None or run is None else {home: run}

    def serves(self, index: int) -> bool:
        """Tell whether it runs on a GPU: that it was compiled for, or one of the same kind."""
        if self._home is None or index in self._versions:
            return self._home is not None
        if not _is_same_kind(self._home, index):
            return False
        try:
            self._version(index)
        except Exception:  # torch's inner workings may have changed: then it is compiled for that GPU, as ever
            logger.warning(
                "DataParallel: code compiled for cuda:%d can't be loaded for others", self._home, exc_info=True
            )
            self._home = None
        return self._home is not None

    def __call__(self, inputs: list[Any]) -> Any:
        return self._version(device_index_of(inputs))(inputs)

    def _version(self, index: int) -> Callable[[list[Any]], Any]:
        found = self._versions.get(index)
        if found is None:
            with self._loading:
                if index not in self._versions and self._load is not None:
                    self._versions[index] = self._load(index)
                found = self._versions[index]
        return found


class _Captured:
    """A graph that torch makes CUDA graphs of, one per GPU: it is warmed up and captured first, then replayed.

    torch counts on one thread at a GPU. Autograd has one for each, and they copy gradients to each other's.

    Args:
        run: Takes a list of inputs, which it empties.
        static: Indices of the inputs that stay where they are: parameters, and what forward has saved.
        copies_outputs: Gradients end up in ``.grad``, in the very memory they come in: they must not stay where
            the next run of a CUDA graph writes.
    """

    def __init__(
        self, run: Callable[[list[Any]], Any], static: Sequence[int] = (), *, copies_outputs: bool = False
    ) -> None:
        self._run = run
        self._static = frozenset(static)
        self._copies_outputs = copies_outputs
        self._replaying: set[int] = set()

    def __call__(self, inputs: list[Any]) -> Any:
        index = device_index_of(inputs)
        manager = cuda_graph_manager(index)
        # Warming up, torch frees inputs while its own stream is not done with them. Threads of other GPUs, which
        # don't wait for that stream, would be given their memory.
        for i, x in enumerate(inputs):
            if i not in self._static and isinstance(x, Tensor) and x.is_cuda:
                x.record_stream(manager.stream)
        with nullcontext() if index in self._replaying else _capturing:
            outputs = self._run(inputs)
            if is_replaying(manager):
                self._replaying.add(index)
        return _copied(outputs) if self._copies_outputs else outputs


def device_index_of(inputs: Sequence[Any]) -> int:
    """Find the GPU that a graph is to run on: that of its first input on one, or the current one."""
    for x in inputs:
        if isinstance(x, Tensor) and x.device.type == "cuda":
            return x.device.index
    return torch.cuda.current_device()


def why_not(compiled: Any, example_inputs: Sequence[Any]) -> str | None:
    """Tell why a compiled graph can't be loaded for another GPU; None when it can.

    Args:
        compiled: torch's ``CompiledFxGraph``, with the names it has in torch 2.11 to 2.13.
        example_inputs: What it was compiled for.
    """
    if not all(isinstance(x, Tensor | int | torch.SymInt) for x in example_inputs):
        return "a graph takes something else than tensors and numbers, such as a random generator"
    try:
        if set(compiled.device_types) - {"cpu"} != {"cuda"} or len(compiled.device_idxs) != 1:
            return f"a graph is for {', '.join(compiled.device_types) or 'no device'}"
        if compiled.constants is None or compiled.frozen_param_names or compiled.torchbind_constants:
            return "a graph has parameters built in"
        home = next(iter(compiled.device_idxs))
        if retarget(compiled.source_code, home, home + 1) is None:
            return "the generated code names its GPU in an unknown way"
    except AttributeError as error:
        return f"this torch keeps compiled graphs in another way ({error})"
    return None


def load_version(
    compiled: Any, index: int, options: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> Callable[[list[Any]], Any]:
    """Load a compiled graph again, for another GPU.

    Args:
        compiled: A ``CompiledFxGraph`` that ``why_not`` has nothing against.
        index: The other GPU.
        options: Inductor's options.
        kwargs: What the graph was compiled with.
    Source:
        What ``torch._inductor.codecache.FxGraphCache`` does with a graph from its cache on disk.
    """
    source = retarget(compiled.source_code, next(iter(compiled.device_idxs)), index)
    version, constants = copy.copy(compiled), _Constants(torch.device("cuda", index))
    version.prepare_for_serialization()  # lets go of the first GPU's code
    version.source_code = source
    version.cache_key = write_code(source or "")
    version.device_idxs = type(compiled.device_idxs)([index])
    # Not the boxes of the first GPU: what is found out about one graph decides on the next.
    boxes = make_boxes(cudagraphs=kwargs["cudagraphs"], index=index)
    with torch.cuda.device(index), inductor_config().patch(dict(options)):
        version.after_deserialization(constants)
        version.post_compile((), constants, {"is_backward": False, **kwargs, **boxes})
    return _Version(version, compiled)


class _Version:
    """A graph that was loaded for another GPU than it was compiled for."""

    def __init__(self, loaded: Any, compiled: Any) -> None:
        # Dropped, a CompiledFxGraph takes its code apart: it lives as long as what runs it.
        self._loaded = loaded
        self._run = loaded.current_callable
        self._tuned: Mapping[str, Any] | None = _names_of(compiled)

    def __call__(self, inputs: list[Any]) -> Any:
        if self._tuned is not None:  # by now the first GPU's kernels have run
            _choose_alike(self._tuned, _names_of(self._loaded))
            self._tuned = None
        return self._run(inputs)


class _Constants:
    """Stands in for torch's ``CompiledFxGraphConstants``: a graph's constants, on another GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[str, Any] | None = None

    def unwrap(self, compiled: Any) -> dict[str, Any]:
        if self._moved is None:
            self._moved = {name: self._move(value) for name, value in compiled.constants.items()}
        return {**self._moved, **getattr(compiled, "opaque_value_type_classes", {})}

    def _move(self, value: Any) -> Any:
        on_gpu = isinstance(value, Tensor) and value.device.type == "cuda"
        return comm.copy(value, self._device) if on_gpu else value


def _keep_saved_tensors() -> None:
    """Have backward leave alone what forward saved, for ``backward(retain_graph=True)``.

    torch decides on it at the first backward, where it compiles that. Of the list that says what backward may write,
    all who look at it have the same one.
    """
    metadata = getattr(tracing_context(), "fw_metadata", None)
    writable = getattr(metadata, "bw_donated_idxs", None)
    if writable:
        writable.clear()


def _names_of(compiled: Any) -> Mapping[str, Any]:
    """Return the globals of a graph's generated module; none where torch keeps no runner."""
    runner = getattr(compiled, "compiled_fn_runner", None)
    return getattr(getattr(type(runner), "call", None), "__globals__", {})


def _choose_alike(tuned: Mapping[str, Any], kernels: Mapping[str, Any]) -> None:
    """Give kernels the launch configurations that were the fastest on the first GPU.

    It saves trying them out, and sums come out the same on all GPUs.
    """
    for name, kernel in kernels.items():
        chosen, candidates = (getattr(k, "launchers", None) for k in (tuned.get(name), kernel))
        if isinstance(chosen, list) and isinstance(candidates, list) and len(chosen) == 1 and len(candidates) > 1:
            wanted = str(getattr(chosen[0], "config", None))
            alike = [launcher for launcher in candidates if str(getattr(launcher, "config", None)) == wanted]
            if len(alike) == 1:
                kernel.launchers = alike


def _copied(outputs: Sequence[Any]) -> list[Any]:
    """Copy what lies on a GPU, in one launch per dtype."""
    copies = [torch.empty_like(x) if isinstance(x, Tensor) and x.is_cuda else x for x in outputs]
    pairs = [(c, x) for c, x in zip(copies, outputs) if c is not x]
    for dtype in dict.fromkeys(x.dtype for _, x in pairs):
        targets, sources = zip(*((c, x) for c, x in pairs if x.dtype is dtype))
        foreach_copy_(list(targets), list(sources))
    return copies


def _is_same_kind(a: int, b: int) -> bool:
    """Tell whether two GPUs run the same code: kernels are laid out for a number of multiprocessors."""
    if a == b:
        return True
    one, other = torch.cuda.get_device_properties(a), torch.cuda.get_device_properties(b)
    return all(
        getattr(one, name) == getattr(other, name) for name in ("name", "major", "minor", "multi_processor_count")
    )
