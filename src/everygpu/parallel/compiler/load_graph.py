"""Load a graph again that was compiled for one GPU, for another of its kind.

What is generated names its GPU in a handful of places: guards, streams and the properties of each kernel. These are
known by form. Source in which anything else could name a GPU is left alone: then each GPU is compiled for by itself.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu import comm
from everygpu.torch_private import is_tried
from everygpu.torch_private.compiler import inductor_config, make_boxes, write_code

_NAMED = re.compile(
    r"""(?P<before>
        torch\.cuda\._DeviceGuard\( | torch\.cuda\.set_device\( | \bget_raw_stream\( |
        \bDeviceProperties\(type='cuda',\ index= | \bdevice\(type='cuda',\ index= | ['"]cuda:
    )(?P<index>\d+)(?P<after>[,)'"])""",
    re.VERBOSE,
)
"""The forms in which a GPU is named."""

_SUSPECT = re.compile(
    r"""cuda:\d | \bcuda['"],\s*(?:index\s*=\s*)?\d | \btorch\.cuda\.\w+\( | DeviceGuard\( | \bset_device\( |
        \bget_raw_stream\( | \bDeviceProperties\( | \bdevice\((?!type='cpu'\)) | \bempty_strided_p2p\( |
        \basync_compile\.(?!triton\b|wait\b|cpp)\w+""",
    re.VERBOSE,
)
"""What may name a GPU in a form that we don't know, or code that isn't in the source."""

_GUARD = "torch.cuda._DeviceGuard("
"""In all code that Inductor's Python wrapper generates for a GPU; not in that of its C++ wrapper."""

_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)


def retarget(source: str, old: int, new: int) -> str | None:
    """Rewrite what Inductor generated for one GPU for another; None where another index may not be all it takes.

    Source: ``torch/_inductor/codegen/wrapper.py`` and ``codegen/cuda/device_op_overrides.py``.
    """
    found = list(_NAMED.finditer(source))
    if _GUARD not in source or any(int(match["index"]) != old for match in found):
        return None
    if _SUSPECT.search(_COMMENT.sub("", _NAMED.sub("", source))):
        return None
    return _NAMED.sub(lambda match: f"{match['before']}{new}{match['after']}", source)


def unsupported_reason(compiled: Any, example_inputs: Sequence[Any]) -> str | None:
    """Return why a ``CompiledFxGraph``, as in torch 2.11 to 2.13, can't be loaded for another GPU; None if it can."""
    if not is_tried(torch.__version__):
        return f"loading graphs for further GPUs is not tried with torch {torch.__version__}"
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
    """Load a compiled graph without an ``unsupported_reason`` again, for another GPU, with Inductor's options and what
    it was compiled with.

    Source: what ``torch._inductor.codecache.FxGraphCache`` does with a graph from its cache on disk.
    """
    source = retarget(compiled.source_code, next(iter(compiled.device_idxs)), index)
    version, constants = copy.copy(compiled), _Constants(torch.device("cuda", index))
    version.prepare_for_serialization()  # lets go of the first GPU's code
    version.source_code = source
    version.cache_key = write_code(source or "")
    version.device_idxs = type(compiled.device_idxs)([index])
    # Not the boxes of the first GPU: what is found out about one graph decides on the next.
    boxes = make_boxes(index)
    with torch.cuda.device(index), inductor_config().patch(dict(options)):
        version.after_deserialization(constants)
        version.post_compile((), constants, {"is_backward": False, **kwargs, **boxes})
    return _Version(version, compiled)


class _Version:
    """A graph that was loaded for another GPU than it was compiled for."""

    def __init__(self, loaded: Any, compiled: Any) -> None:
        # A CompiledFxGraph that is dropped unloads its code: it must live as long as what runs it.
        self._loaded = loaded
        self._run = loaded.current_callable
        self._tuned: Mapping[str, Any] | None = _names_of(compiled)

    def __call__(self, inputs: list[Any]) -> Any:
        if self._tuned is not None:  # by now the first GPU's kernels have run
            _choose_same_configs(self._tuned, _names_of(self._loaded))
            self._tuned = None
        return self._run(inputs)


class _Constants:
    """Replaces torch's ``CompiledFxGraphConstants``: a graph's constants, on another GPU."""

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


def _names_of(compiled: Any) -> Mapping[str, Any]:
    """Return the globals of a graph's generated module; none where torch keeps no runner."""
    runner = getattr(compiled, "compiled_fn_runner", None)
    return getattr(getattr(type(runner), "call", None), "__globals__", {})


def _choose_same_configs(tuned: Mapping[str, Any], kernels: Mapping[str, Any]) -> None:
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
