"""Proof that a module's forward may be captured: Dynamo traces a call as one graph, and guards all that it read."""

import builtins
import operator
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, starmap
from types import CodeType, FunctionType, MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from everygpu import tree
from everygpu.keys import is_compiled
from everygpu.parallel.compiler.capturable_graph import (
    code_reason,
    in_line,
    innermost,
    inputs_of,
    is_argument,
    kept_attributes,
    name_of,
    plain_name,
    reads_environment,
    reason_in_graph,
    reason_in_python,
    source_of,
    without_flattening,
    without_marks,
)
from everygpu.parallel.cuda_graphs.guards import torch_settings
from everygpu.parallel.cuda_graphs.reached_state import bits_of, fill_lazily
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.torch_private import is_tried
from everygpu.torch_private.compiler import (
    absences,
    cache_entries,
    captured_answers,
    context_var_reads,
    current_trace,
    drop_code,
    noted_absences,
    scoped_config,
    traced_code,
    traced_context_vars,
    traced_objects,
    value_in_context,
    without_warnings,
)

_LONGEST = 240
_SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        # What a trace may ignore or postpone is part of what a call does.
        "reorderable_logging_functions": set(),
        "replay_side_effects": True,
        "suppress_errors": False,
        # NumPy's calls would be traced as torch's; the call itself runs them on the host.
        "trace_numpy": False,
        "capture_scalar_outputs": False,
        "capture_dynamic_output_shape_ops": False,
        "allow_rnn": True,
        "specialize_float": True,  # else, with open shapes, a module's float is an input on the CPU
        # Guards that Dynamo leaves out for speed.
        "guard_nn_modules": True,
        "skip_nnmodule_hook_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        "skip_guards_on_constant_func_defaults": False,
        "assume_dunder_attributes_remain_unchanged": False,
        "use_recursive_dict_tags_for_guards": False,
    }
)


class _TracedError(Exception):
    """Raised in place of a traced call: it is not to run."""


@dataclass(slots=True)
class _Findings:
    """What the backend finds in a trace; it is reached by the globals of the traced function, as backends are kept."""

    reason: str | None = None
    sources: list[str] = field(default_factory=list)
    guarded: list[str] = field(default_factory=list)
    """Where what Dynamo has guards on is found, as Python."""
    read_rest: Callable[[], list[Any]] = list
    """See ``_rest_reader``."""
    num_subtractions: int = 0


@dataclass(frozen=True, kw_only=True)  # without slots, for weak references
class _Proof:
    code: CodeType
    """The traced function's, which Dynamo keeps the guards with."""
    probe: Tensor
    read_tensors: Callable[[dict[str, Any]], tuple[Tensor, ...]]
    tensors: tuple[Tensor, ...]
    """All that forward reads besides its arguments: a capture reads these, at their addresses."""
    read_rest: Callable[[dict[str, Any]], list[Any]]
    rest: list[Any]
    """What Dynamo has no guards on, or none that see each change."""
    settings: tuple[Any, ...]


class WholeGraph:
    """Whether a call of a module may be captured as a CUDA graph, and whether another call is the same.

    A capture repeats kernels: the call, if forward reads nothing that changes unseen, and changes nothing but
    tensors. ``torch.compile(fullgraph=True)`` traces just such functions, with guards on all that the trace has read;
    here its backend runs nothing. Not seen are the values and addresses of tensors (``p.data = other``) and autograd's
    hooks on tensors. A module that is compiled, or has a compiled module below it, is refused.

    ``prove`` holds Dynamo's lock; ``holds`` may run in several threads, but not during a ``prove`` of the same object.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._proof: _Proof | None = None

    def prove(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, any_shapes: bool = False) -> str | None:
        """Trace one call, in seconds, without running it; return the reason, in one line, if it may not be captured.

        Not while a thread captures a CUDA graph, as Dynamo reads the state of the GPU's random numbers. Tensors are
        guarded by shape, stride, dtype and device, numbers and strings by value. ``any_shapes`` guards only what the
        trace depends on in shapes and numbers: it takes twice as long, and isn't possible for every module.
        """
        self._proof = None
        try:
            proof = _prove(self._module, tuple(args), dict(kwargs), any_shapes=any_shapes)
        except Exception as error:  # noqa: BLE001 - a compiler's errors have no class in common
            return _shorten(_explain(error))
        if isinstance(proof, str):
            return _shorten(proof)
        self._proof = proof
        weakref.finalize(proof, drop_code, proof.code).atexit = False
        return None

    def holds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Check the guards for another call, in microseconds, without tracing; False without a proof."""
        return self._proof is not None and torch_settings() == self._proof.settings and self.still_holds(args, kwargs)

    def still_holds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Check the guards, where torch's settings are known to be as they were."""
        proof = self._proof
        # Read again: guards on an object that is gone fail by removing the entry, as torch._dynamo.reset() does.
        entry = next(iter(cache_entries(proof.code)), None) if proof is not None else None
        if proof is None or entry is None:
            return False
        values = {"module": self._module, "probe": proof.probe, "args": tuple(args), "kwargs": dict(kwargs)}
        return (
            entry.guard_manager.check(values)
            and all(map(operator.is_, proof.read_tensors(values), proof.tensors))
            and proof.read_rest(values) == proof.rest
        )


def _traced_call(module: nn.Module, probe: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The subtraction makes a graph of each call: without one, Dynamo would have the call run.
    return module(*args, **kwargs), probe - 1


def _traced_probe(module: nn.Module, probe: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return probe + 1 if torch.compiler.is_compiling() else probe - 1


def _prove(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, any_shapes: bool) -> _Proof | str:
    if not is_tried(torch.__version__):
        return f"proofs by Dynamo are not tried with torch {torch.__version__}"
    if any(is_compiled(m) for m in module.modules()):
        return "the module has been compiled by torch.compile already"
    if any(is_lazy(tensor) for tensor in chain(module.parameters(), module.buffers())):
        return "the module has parameters without a shape: its first call makes them"
    probe = torch.zeros((), device="cpu")
    values: dict[str, Any] = {"module": module, "probe": probe, "args": args, "kwargs": kwargs}
    values |= dict(zip(("args", "kwargs"), _as_aliases((args, kwargs))))
    with ExitStack() as stack:
        stack.enter_context(captured_answers())
        stack.enter_context(without_warnings())
        stack.enter_context(traced_context_vars())
        stack.enter_context(noted_absences())
        stack.enter_context(scoped_config({**_SETTINGS, "ignore_logging_functions": _SaidOnce()}))
        stack.enter_context(without_marks([*module.parameters(), *module.buffers()]))
        stack.enter_context(without_flattening(module))
        # Where torch.compile is switched off, a function that it is given runs: this one does no harm.
        function, found = _trace(_traced_probe, values)
        drop_code(function.__code__)
        if found is None or found.num_subtractions != 1:
            return "torch.compile is switched off, or this torch can't trace what runs eagerly"
        function, found = _trace(_traced_call, values, any_shapes=any_shapes)
    if found is None or found.reason is not None:
        drop_code(function.__code__)
        return "torch.compile has left the call out" if found is None else str(found.reason)
    scope = function.__globals__
    read_tensors = _reader(found.sources, scope)
    places = list(zip(found.guarded, _reader(found.guarded, scope)(values)))
    if array := next((name for name, value in places if isinstance(value, np.ndarray)), None):
        drop_code(function.__code__)
        return f"forward reads NumPy's array {plain_name(array)}, whose values Dynamo doesn't guard"
    # Dynamo's guards don't see the order of these, nor that an element became an equal one, as 1 and 1.0 are.
    coarse = [name for name, value in places if isinstance(value, (OrderedDict, set, frozenset)) and len(value) > 0]
    read_coarse, read_unguarded = _reader(coarse, scope), found.read_rest

    def read_rest(values: dict[str, Any]) -> list[Any]:
        return [*read_unguarded(), *map(_exactly, read_coarse(values))]

    return _Proof(
        code=function.__code__,
        probe=probe,
        read_tensors=read_tensors,
        tensors=read_tensors(values),
        read_rest=read_rest,
        rest=read_rest(values),
        settings=torch_settings(),
    )


def _exactly(value: Any) -> Any:
    """Return what shows each change of an ordered dict's order, or of a set's elements."""
    if isinstance(value, OrderedDict):
        return list(value)
    return {(type(x), bits_of(x)) for x in value} if isinstance(value, (set, frozenset)) else None


def _reader(sources: Iterable[str], scope: dict[str, Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Make what reads what Dynamo has found: Python over ``L``, what a call gets, and ``G``, globals."""
    items = "".join(f"{source}, " for source in sources)
    read: Callable[[dict[str, Any]], tuple[Any, ...]] = eval(f"lambda L: ({items})", {"G": scope})
    return read


def _rest_reader(trace: Any) -> Callable[[], list[Any]]:
    """Make what reads what Dynamo takes to stay as it is: of the classes of all objects that a trace has met the number
    of attributes, and the functions whose code was traced; context variables; the environment, where it is read; names
    that Python modules don't have; attributes that forward writes, and a capture doesn't, as they have these values.
    """
    codes, classes = traced_code(trace), {type(value) for value in traced_objects(trace)}
    traced = set(map(id, codes))
    bases = {base for owner in classes for base in owner.__mro__}
    for base in bases:
        fill_lazily(base)
    spaces = list(map(vars, bases))
    places = [(owner, name) for owner in classes for name in dir(owner) if id(_code_of(owner, name)[1]) in traced]
    context, absent = list(context_var_reads(trace)), absences(trace)
    kept = kept_attributes(trace)
    environments = [os.environ] if any(map(reads_environment, codes)) else []

    def read() -> list[Any]:
        values = map(value_in_context, context)
        return [
            *map(len, spaces),
            *starmap(_code_of, places),
            *((type(v), v) for v in values),
            *map(dict, environments),
            *starmap(hasattr, absent),
            *(vars(of).get(name) for of, name in kept),
        ]

    return read


def _code_of(owner: type, name: str) -> tuple[Any, Any]:
    """Return a class's function and its code; that of a property's getter; of anything else, None as the code."""
    value = getattr(owner, name, None)
    value = getattr(value, "fget", getattr(value, "__func__", value))  # each access binds a class method again
    return value, getattr(value, "__code__", None)


class _SaidOnce(set[Any]):
    """The methods of loggers that say each message once, such as transformers' ``warning_once``. Not a set of them:
    Dynamo sorts those for its log.
    """

    def __contains__(self, method: object) -> bool:
        return hasattr(method, "cache_info")


def _as_aliases(arguments: Any) -> Any:
    """Give each tensor without gradient another object: Dynamo may find one that is also a global or an attribute,
    as either, and guards that the two are the same by halves. Different objects are guarded to stay different. Of two
    that share memory, Dynamo takes the second one for written: that gets memory of its own.
    """
    aliases: dict[int, Tensor] = {}
    places: set[int] = set()

    def alias(value: Any) -> Any:
        if type(value) is not Tensor or value.requires_grad:
            return value
        if id(value) not in aliases:
            place = value.untyped_storage().data_ptr() if is_dense(value) else 0
            is_shared = place != 0 and place in places
            places.add(place)
            aliases[id(value)] = torch.empty_like(value) if is_shared else value.detach()
        return aliases[id(value)]

    return tree.map_leaves(alias, arguments)


def _trace(
    function: Callable[..., Any], values: dict[str, Any], *, any_shapes: bool = False
) -> tuple[FunctionType, _Findings | None]:
    """Trace a function of this file; return the copy of it that has the guards, and None if it ran."""
    found = _Findings()
    # A copy has guards, limits of recompilation and globals of its own.
    scope = {"__builtins__": builtins, "__name__": __name__, "torch": torch, "found": found}
    copy = FunctionType(function.__code__.replace(), scope, function.__name__)
    try:
        torch.compile(copy, backend=_inspect, fullgraph=True, dynamic=any_shapes)(**values)
    except _TracedError:
        return copy, found
    except Exception:
        if found.reason is None:
            raise
        return copy, found
    finally:
        del scope["found"]  # its code has the guards, which have the globals: a circle that garbage collection misses
    return copy, None


def _inspect(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    """Serve as the backend: look at a trace, and have nothing run."""
    trace = current_trace()
    found: _Findings = trace.root_tx.f_globals["found"]
    # Under torch.set_default_device, operators are traced as the methods of tensors that they are.
    found.num_subtractions = sum(getattr(n.target, "__name__", n.target) == "sub" for n in graph.graph.nodes)
    found.sources = [name for name in map(source_of, inputs_of(graph)) if not is_argument(name) and "probe" not in name]
    found.reason = reason_in_python(trace)
    if found.reason is not None:
        raise _TracedError  # before what Dynamo would run ahead of the graph: drawing random numbers
    if trace.root_tx.f_code.co_name == _traced_call.__name__:
        found.guarded = sorted({name for name in map(name_of, trace.guards) if name and "___" not in name})
        found.reason = code_reason(traced_code(trace)) or reason_in_graph(graph)
        found.read_rest = _rest_reader(trace)
    return _stop


def _stop(*_: Any) -> Any:
    raise _TracedError


def _explain(error: Exception) -> str:
    """Say in one line why Dynamo has refused a call, and where."""
    stack = getattr(error, "real_stack", None) or []
    error = getattr(error, "inner_exception", error)  # of a backend
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if not stack:
        return f"this torch can't trace the call: {type(error).__name__}: {message}"
    frame = innermost(stack)
    line = f" ({frame.line.strip()})" if frame and frame.line else ""
    _, has_cause, cause = str(error).partition("): got ")  # of an operation on tensors without memory
    why = f" ({cause.splitlines()[0]})" if has_cause else ""
    return f"Dynamo can't trace forward{in_line(stack)}{line}: {message}{why}"


def _shorten(reason: str) -> str:
    return reason if len(reason) <= _LONGEST else f"{reason[: _LONGEST - 3]}..."
