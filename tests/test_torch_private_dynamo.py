"""What the private names of torch's compiler must do that proofs of recordings stand on."""

import functools
from contextvars import ContextVar

import pytest
import torch
from torch import nn

from everygpu.torch_private import dynamo

# Importing torch's compiler warns of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_a_trace_shows_what_a_function_writes_and_reads():
    found, kept = {}, []

    def backend(graph, inputs):
        trace = dynamo.current_trace()
        effects = trace.side_effects
        written = [v for v in dynamo.modified_variables(effects) if dynamo.is_from_before(v)]
        found.update(objects=dynamo.traced_objects(trace), code=dynamo.traced_code(trace), written=len(written))
        found["constants"] = [dynamo.written_constants(effects, v) for v in written]
        found["rest"] = trace.random_calls, effects.tensor_hooks, effects.store_attr_mutations, trace.root_tx.f_globals
        return graph.forward

    cached = functools.lru_cache(lambda: 1)  # as Dynamo warns of

    def function(layer, x):
        kept.append(cached())
        layer.size = 3
        return layer(x) if not torch.compiler.is_compiling() else x

    layer, x = nn.Linear(2, 2), torch.ones(2)
    with (
        dynamo.recorded_answers(),
        dynamo.traced_context_vars(),
        dynamo.without_warnings(),
        dynamo.scoped_config({"trace_numpy": False, "no such setting": 1}),
    ):
        torch.compile(function, backend=backend)(layer, x)
    assert found["written"] == 2
    assert [rows for rows in found["constants"] if rows] == [[(layer, "size", 3)]]
    assert any(value is layer for value in found["objects"])
    assert {function.__code__, nn.Linear.forward.__code__} <= set(found["code"])
    assert found["rest"][:2] == ([], {})
    assert found["rest"][3] is globals()
    (entry,) = dynamo.cache_entries(function.__code__)
    assert not entry.guard_manager.check({"layer": layer, "x": x})  # ``kept`` is longer now
    dynamo.drop_code(function.__code__)
    assert dynamo.cache_entries(function.__code__) == []
    assert torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")(torch.zeros(())) == 1


def test_operators_of_a_higher_order_are_told():
    assert dynamo.is_higher_order(torch.ops.higher_order.cond)
    assert not dynamo.is_higher_order(torch.ops.aten.add.Tensor)


def test_context_variables_are_traced():
    read, kept = ContextVar("read", default=3), ContextVar("kept")
    found = {}

    def backend(graph, inputs):
        trace = dynamo.current_trace()
        found.update(reads=dynamo.context_var_reads(trace), open=dynamo.open_context_vars(trace))
        return graph

    def run(x):
        token = kept.set(x * 2)
        y = kept.get() * read.get()
        kept.reset(token)
        kept.set(1)
        return y

    with dynamo.traced_context_vars():
        ours = torch.compile(run, backend=backend, fullgraph=True)(torch.ones(2))
    torch.testing.assert_close(ours, torch.full((2,), 6.0))
    assert found == {"reads": {read: 3}, "open": ["kept"]}
    assert (dynamo.value_in_context(read), dynamo.value_in_context(kept)) == (3, ...)
