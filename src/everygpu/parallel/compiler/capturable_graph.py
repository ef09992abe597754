"""What a forward's trace may contain for a CUDA graph of it to repeat the call: kernels on tensors that stay in place.

A function of that returns None, or a reason in one line. Those before read Dynamo's graphs, each a
``torch.fx.GraphModule`` whose parameters are inputs, or say what tracing a module takes.
"""

import dis
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from everygpu.torch_private.compiler import (
    is_from_before,
    is_higher_order,
    modified_variables,
    open_context_vars,
    written_constants,
)


def inputs_of(graph: Any) -> list[Any]:
    """Return the nodes of a graph's inputs, in order."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def value_of(node: Any) -> Any:
    """Return what Dynamo has run a node on, or has got of it: a tensor without memory, a number; None if not kept."""
    return node.meta.get("example_value")


def is_written(node: Any) -> bool:
    """Whether a graph writes to an input."""
    value = value_of(node)
    return isinstance(value, Tensor) and value._version > 0  # by Dynamo, which has run the graph on this value


@contextmanager
def without_marks(tensors: list[Tensor]) -> Iterator[None]:
    """Take away the attributes that Dynamo leaves on a module's tensors."""
    before = [set(vars(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, names in zip(tensors, before):
            for name in set(vars(tensor)) - names:
                if name.startswith("_dynamo_"):
                    delattr(tensor, name)


@contextmanager
def without_flattening(module: nn.Module) -> Iterator[None]:
    """Trace recurrent layers' ``flatten_parameters`` as what it is without cuDNN, nothing: it moves weights, which
    changes no value, and Dynamo can't trace it.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = before and not any(isinstance(m, nn.RNNBase) for m in module.modules())
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_OURS = str(Path(__file__).parents[2])
PROBE = "L['probe']"
"""The tensor that the prover adds to the call."""
_OPERATORS = {"aten", "prims", "prim"}
_HIGHER_ORDER = {"tag_activation_checkpoint", "autograd_function_apply", "flex_attention"}
_STATEMENTS = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast"}
"""What returns nothing, and changes what the same trace changes back."""
_WITHOUT_RESULT = {*_STATEMENTS, "setitem", "_log_api_usage_once"}
_MOVES_TENSORS = {"set_", "shallow_copy_data_", "resize_", "resize_as_", "register_hook", "detach_", "swap_tensors"}
"""``x.data = y`` is the first up to torch 2.13, the second from 2.15 on."""
_NUMBERS = {bool, int, float, str}
_CONSTANTS = {"tensor", "as_tensor", "scalar_tensor", "full", "zeros", "ones", "arange", "linspace"}
"""What makes the same values in each call, so that a copy of them may be captured."""


def source_of(node: Any) -> str:
    """Return where an input of a graph comes from, as Python over ``L``, the call's arguments, and ``G``, globals."""
    argument = node.meta.get("grapharg")  # none in a graph within, as of a checkpointed region
    return str(node.name) if argument is None else name_of(argument.source)


def name_of(source: Any) -> str:
    name = getattr(source, "name", "")  # a method in torch 2.10 and older
    return str(name() if callable(name) else name)


def is_argument(name: str) -> bool:
    return name.startswith(("L['args']", "L['kwargs']"))


def reason_in_python(trace: Any) -> str | None:
    """Name a write to Python's state, which a capture doesn't repeat, or a number that the host draws."""
    if trace.random_calls:
        return "forward draws a random number on the host, which a capture keeps"
    effects = trace.side_effects
    for variable in modified_variables(effects):
        if is_from_before(variable) and not _kept(effects, variable):
            stacks = getattr(effects, "mutation_user_stacks", {}).get(variable, [])
            where = in_line(stacks[-1] if stacks else [])
            return f"forward writes to {_written_name(effects, variable)}{where}, which a capture doesn't repeat"
    if left := open_context_vars(trace):
        return f"forward leaves the context variable {left[0]} set, which a capture doesn't repeat"
    if effects.tensor_hooks:
        return "forward adds a hook to a tensor, which a capture doesn't repeat"
    return None


def kept_attributes(trace: Any) -> list[tuple[Any, str]]:
    """Return objects and names of the attributes that a trace writes, and leaves as they are."""
    return [pair for variable in modified_variables(trace.side_effects) for pair in _kept(trace.side_effects, variable)]


def _kept(effects: Any, variable: Any) -> list[tuple[Any, str]]:
    """Return the attributes that are written to an object, if each has this value, such as a size, already."""
    written = written_constants(effects, variable)
    are_there = (
        type(value) in _NUMBERS and type(now := getattr(of, "__dict__", {}).get(name)) is type(value) and now == value
        for of, name, value in written
    )
    return [(of, name) for of, name, _ in written] if all(are_there) else []


def _written_name(effects: Any, variable: Any) -> str:
    name = name_of(variable.source) if variable.source is not None else variable.python_type_name()
    name = plain_name(name)
    written = effects.store_attr_mutations.get(variable, {})
    attributes = "/".join(str(key) for key in written if key != "cell_contents")
    return f"{name}.{attributes}" if attributes else name


def plain_name(source: str) -> str:
    """Write a source as a person would: ``module.layer.weight``."""
    name = re.sub(r"\.?__dict__\['(\w+)'\]", r".\1", source)
    name = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", name)
    return re.sub(r"[LG]\['(?:__import_)?(.+?)'\]", r"\1", name)


def code_reason(codes: Iterable[CodeType]) -> str | None:
    """Name a function of a trace that reads an object's address, on which Dynamo has no guard."""
    for code in codes:
        if code.co_filename.startswith(_TORCH) or _is_of_python(code):  # where addresses are keys only
            continue
        where = in_line([FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)])
        if any(i.argval == "id" and i.opname == "LOAD_GLOBAL" for i in dis.get_instructions(code)):
            return f"forward calls id(){where}, which Dynamo doesn't guard"
    return None


def _is_of_python(code: CodeType) -> bool:
    return code.co_filename.startswith(_STDLIB) and "-packages" not in code.co_filename


def reads_environment(code: CodeType) -> bool:
    """Whether code may read the environment's variables, on which Dynamo has no guard."""
    return not code.co_filename.startswith(_TORCH) and bool({"environ", "getenv"} & set(code.co_names))


def reason_in_graph(graph: Any) -> str | None:
    """Name what a CUDA graph can't repeat among a trace's operations: code that can't be seen, values that are read
    back, writes to an argument, work on the host.
    """
    written = (n for n in inputs_of(graph) if is_written(n) and is_argument(source_of(n)))
    if (node := next(written, None)) is not None:
        return f"forward writes to its argument {plain_name(source_of(node))}: a capture writes to a copy"
    home = home_of(graph).type
    checks: list[Callable[[Any], str | None]] = [_value_reason, _call_reason]
    if home != "cpu":
        on_host = (source_of(n) for n in inputs_of(graph) if _is_on_host(n) and source_of(n) != PROBE)
        if (source := next(on_host, None)) is not None:
            return f"forward reads {plain_name(source)} on the CPU, whose values a capture keeps"
        checks.append(_host_reason)
    for node in _calls(graph):
        for check in checks:
            if (reason := check(node)) is not None:
                return f"forward {reason}{in_line(_frames(node.stack_trace))}"
    num_kernels = sum(_label(node) not in _STATEMENTS for node in _calls(graph))  # one is the prover's
    return _mode_reason(graph) or ("forward runs no operation on tensors" if num_kernels < 2 else None)


def _calls(graph: nn.Module) -> Iterator[Any]:
    """Yield all calls of a graph, and those of graphs in it, such as of checkpointed functions."""
    for node in graph.graph.nodes:  # type: ignore[union-attr]
        if node.op.startswith("call_"):
            yield node
        elif node.op == "get_attr" and isinstance(part := getattr(graph, node.target, None), torch.fx.GraphModule):
            yield from _calls(part)


def _label(node: Any) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _call_reason(node: Any) -> str | None:
    label = _label(node)
    if is_higher_order(node.target):
        return None if label in _HIGHER_ORDER else f"calls the higher-order operator {label}, which may need the host"
    if label.split(".")[0] in _MOVES_TENSORS:  # operators' names end with that of their overload
        return f"calls {label} on a tensor, which a capture doesn't repeat"
    home = getattr(node.target, "__module__", None) or "torch"
    if home.startswith(("torch._ops.", "torch.ops.")):
        is_known = home.split(".")[2] in _OPERATORS
        return None if is_known else f"calls the custom operator {node.target}, whose code can't be seen"
    if home.split(".")[0] not in ("torch", "_operator", "math", "builtins"):
        return f"calls {home}.{label}, whose code can't be seen"
    if label not in _WITHOUT_RESULT and value_of(node) is None:
        return f"calls {label}, which returns no tensor"
    return None


def _value_reason(node: Any) -> str | None:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # imports sympy, for proofs only

    for value in _leaves(value_of(node)):
        # What follows from the arguments' shapes has guards.
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(value):
            return f"reads a number back from a tensor by {_label(node)}"
        if isinstance(value, Tensor) and free_unbacked_symbols(value):
            return f"makes a shape that depends on values by {_label(node)}"
    return None


def _host_reason(node: Any) -> str | None:
    is_probed = any(getattr(arg, "op", "") == "placeholder" and source_of(arg) == PROBE for arg in node.args)
    is_captured = is_probed or not _is_on_host(node) or _label(node) in _CONSTANTS
    return None if is_captured else f"works on the CPU by {_label(node)}"


def _is_on_host(node: Any) -> bool:
    return any(isinstance(v, Tensor) and v.device.type == "cpu" for v in _leaves(value_of(node)))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def home_of(graph: Any) -> torch.device:
    """Return the device that a graph works on: that of its first input other than the CPU."""
    devices = [value.device for value in map(value_of, inputs_of(graph)) if isinstance(value, Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _mode_reason(graph: Any) -> str | None:
    """Name a mode that is other after a call than before."""
    labels = [(_label(node), node) for node in graph.graph.nodes if node.op == "call_function"]
    grad = [node.args[0] for label, node in labels if label == "_set_grad_enabled"]
    if grad and grad[-1] != torch.is_grad_enabled():
        return "forward leaves grad mode other than it was"
    entered, left = (sum(label == name for label, _ in labels) for name in ("_enter_autocast", "_exit_autocast"))
    return None if entered == left else "forward leaves autocast other than it was"


def _frames(stack_trace: str | None) -> list[FrameSummary]:
    found = re.findall(r'File "(.+?)", line (\d+), in (\S+)', stack_trace or "")
    return [FrameSummary(file, int(line), name) for file, line, name in found]


def innermost(stack: Iterable[FrameSummary]) -> FrameSummary | None:
    """Return the user's innermost frame of a stack: torch's own modules are called by it."""
    frames = [frame for frame in stack if not frame.filename.startswith(_OURS)]
    users = [frame for frame in frames if not frame.filename.startswith(_TORCH)]
    return next(reversed(users or frames), None)


def in_line(stack: Iterable[FrameSummary]) -> str:
    """Say where the user's code is, `` in model.py:12``; nothing where a stack is empty."""
    frame = innermost(stack)
    return f" in {Path(frame.filename).name}:{frame.lineno}" if frame else ""
