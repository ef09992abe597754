"""torch's compiler: Dynamo's frames, traces and guards, AOTAutograd's settings, Inductor's graphs.

Importing the compiler takes seconds, so it is imported where it is used.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import CodeType
from typing import Any, TypeVar

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])

_eval_frame: Any = torch._C._dynamo.eval_frame


def not_compiled(method: _Method) -> _Method:
    """Keep torch.compile out of a method and what it calls; ``torch.compiler.disable`` wraps it."""
    _set_strategy(method, _eval_frame._FrameAction.SKIP)
    return method


def left_to_run(method: _Method) -> _Method:
    """Keep torch.compile from compiling a method, though not what it calls: there it can be observed."""
    _set_strategy(method, _eval_frame._FrameAction.DEFAULT)
    return method


def _set_strategy(method: Any, calls: Any) -> None:
    strategy = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, calls)
    _eval_frame.set_code_exec_strategy(method.__code__, strategy)


InductorWrapper: Any = torch._TorchCompileInductorWrapper
"""The backend that ``torch.compile`` makes of ``mode`` and ``options``, its ``config``."""


def is_scripted(func: Any) -> bool:
    """Whether a function was made by ``torch.jit.script``."""
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


_EAGER_ANSWERS = ("is_compiling", "is_dynamo_compiling", "is_exporting", "_is_in_optimized_module")


def current_trace() -> Any:
    """Return the ``OutputGraph`` that a backend is called for: ``side_effects``, ``random_calls``, ``root_tx``."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


def is_from_before(variable: Any) -> bool:
    """Whether a variable of a trace represents an object that was there before the traced call."""
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    return isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting))


def modified_variables(side_effects: Any) -> list[Any]:
    """Return the variables of a trace that it writes to, those it has made itself among them."""
    modified: list[Any] = side_effects._get_modified_vars()
    return modified


def written_constants(side_effects: Any, variable: Any) -> list[tuple[Any, str, Any]]:
    """Return the object, name and value of each attribute that a trace writes to a variable, if these are constants."""
    written = side_effects.store_attr_mutations.get(variable, {})
    if "value" not in vars(variable) or not all(value.is_python_constant() for value in written.values()):
        return []
    return [(variable.value, name, value.as_python_constant()) for name, value in written.items()]


def traced_objects(trace: Any) -> list[Any]:
    """Return the objects that a trace has met: modules, and whatever else has attributes or contents."""
    variables = trace.side_effects.id_to_variable.values()
    return [vars(variable)["value"] for variable in variables if "value" in vars(variable)]


def traced_code(trace: Any) -> list[CodeType]:
    """Return the code of all functions that a trace went through."""
    codes: list[CodeType] = trace.tracing_context.traced_code
    return codes


def cache_entries(code: CodeType) -> list[Any]:
    """Return what Dynamo has compiled for a function's code: each with its guards as ``guard_manager``."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return list(_debug_get_cache_entry_list(code))


def note_inlined() -> None:
    """Note, within a backend, which code goes into what is compiled."""
    from torch._dynamo.code_context import code_context

    trace = current_trace()
    code_context.get_context(trace.root_tx.f_code).setdefault(_INLINED, []).extend(traced_code(trace))


_INLINED = "everygpu_inlined"


def compiled_from(code: CodeType) -> tuple[CodeType, list[CodeType] | None] | None:
    """Return what code Dynamo has compiled to this, and what was inlined, None where ``note_inlined`` wasn't called;
    None for code that Dynamo hasn't made.
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")
    known: Any = getattr(utils, "orig_code_map", ())
    if code not in known:  # not yet while it is being imported
        return None
    original = known[code]
    context: Any = sys.modules["torch._dynamo.code_context"]
    return original, context.code_context.get_context(original).get(_INLINED)


def drop_code(code: CodeType) -> None:
    """Free what Dynamo has compiled for a function's code, which it otherwise keeps alive for good."""
    torch._C._dynamo.eval_frame.reset_code(code)


@contextlib.contextmanager
def scoped_config(settings: Mapping[str, Any]) -> Iterator[None]:
    """Trace with settings of Dynamo's, in this thread; those that this torch doesn't have are left out."""
    import torch._dynamo.config as config

    known = {name: value for name, value in settings.items() if hasattr(config, name)}
    with config.patch(**known):
        yield


@contextlib.contextmanager
def captured_answers() -> Iterator[None]:
    """Trace what a capture runs eagerly: not ``is_compiling()``, but ``is_current_stream_capturing()``.

    Dynamo's lock is held meanwhile, so no other thread traces with these answers.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.variables import ConstantVariable, TorchInGraphFunctionVariable
    from torch._dynamo.variables.torch import tracing_state_functions

    is_capturing = torch.cuda.is_current_stream_capturing
    with compile_lock:
        answers, handlers = tracing_state_functions(), TorchInGraphFunctionVariable._get_handlers()
        changed = {f: answer for f, answer in answers.items() if answer and f.__name__ in _EAGER_ANSWERS}
        answers.update(dict.fromkeys(changed, False))
        handlers[is_capturing] = lambda *args, **kwargs: ConstantVariable.create(True)
        try:
            yield
        finally:
            answers.update(changed)
            del handlers[is_capturing]


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Trace without Dynamo's advice to callers of ``torch.compile``, which it gives once; for them it is kept.

    Dynamo's lock is held meanwhile; ``warnings.catch_warnings`` would change the filters of all threads.
    """
    import torch._dynamo.utils as utils
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:
        warn_once = utils.warn_once
        utils.warn_once = lambda *args, **kwargs: None
        try:
            yield
        finally:
            utils.warn_once = warn_once


@contextlib.contextmanager
def traced_context_vars() -> Iterator[None]:
    """Trace ``contextvars.ContextVar``, which Dynamo refuses: what a trace sets, its own later reads find.

    Dynamo's lock is held meanwhile. ``context_var_reads`` and ``open_context_vars`` say what is left.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.variables import ConstantVariable, UserDefinedObjectVariable

    call_method: Any = UserDefinedObjectVariable.call_method

    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        var = self.value
        if not isinstance(var, ContextVar) or kwargs or name not in ("get", "set", "reset"):
            return call_method(self, tx, name, args, kwargs)
        reads, writes = vars(tx.output).setdefault(_CONTEXT, ({}, {}))
        values = writes.setdefault(var, [])
        if name == "set":
            values.append(args[0])
            return ConstantVariable.create(len(values) - 1)
        if name == "reset" and args[0].is_python_constant() and type(args[0].as_python_constant()) is int:
            del values[args[0].as_python_constant() :]
            return ConstantVariable.create(None)
        if name == "get" and values:
            return values[-1]
        value = value_in_context(var)
        if name == "reset" or args or not ConstantVariable.is_literal(value):
            return call_method(self, tx, name, args, kwargs)
        reads[var] = value
        return ConstantVariable.create(value)

    with compile_lock:
        UserDefinedObjectVariable.call_method = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            UserDefinedObjectVariable.call_method = call_method  # type: ignore[method-assign]


def value_in_context(var: ContextVar[Any]) -> Any:
    """Return a context variable's value, or its default; Ellipsis where it has none."""
    try:
        return var.get()
    except LookupError:
        return ...


_CONTEXT = "everygpu_context_vars"


def context_var_reads(trace: Any) -> dict[ContextVar[Any], Any]:
    """Return the context variables that a trace has read as they were before it, with their values."""
    return dict(vars(trace).get(_CONTEXT, ({}, {}))[0])


def open_context_vars(trace: Any) -> list[str]:
    """Name the context variables that a trace leaves set."""
    return [var.name for var, values in vars(trace).get(_CONTEXT, ({}, {}))[1].items() if values]


@contextlib.contextmanager
def noted_absences() -> Iterator[None]:
    """Note which attributes a trace has looked for on Python modules that don't have them: Dynamo has no guards there.

    Dynamo's lock is held meanwhile. ``absences`` returns what was noted.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.variables import PythonModuleVariable

    asked: Any = PythonModuleVariable
    methods = {name: getattr(asked, name) for name in ("call_obj_hasattr", "var_getattr")}

    def noting(method: Any) -> Any:
        def look(self: Any, tx: Any, name: str) -> Any:
            if not hasattr(self.value, name):
                vars(tx.output).setdefault(_ABSENT, []).append((self.value, name))
            return method(self, tx, name)

        return look

    with compile_lock:
        for name, method in methods.items():
            setattr(asked, name, noting(method))
        try:
            yield
        finally:
            for name, method in methods.items():
                setattr(asked, name, method)


_ABSENT = "everygpu_absences"


def absences(trace: Any) -> list[tuple[Any, str]]:
    """Return Python modules, each with a name that a trace hasn't found there."""
    found: list[tuple[Any, str]] = vars(trace).get(_ABSENT, [])
    return found


def is_higher_order(func: Any) -> bool:
    """Whether a node of a graph calls a function with graphs of its own, such as ``torch.cond``."""
    return isinstance(func, torch._ops.HigherOrderOperator)
