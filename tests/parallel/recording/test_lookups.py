"""Which inputs of compiled graphs are looked up by rows, and that these are what is waited for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everygpu.parallel.recording.lookups import find_lookups

Use = Callable[[Tensor, Tensor, nn.Embedding], Tensor]

USES: dict[str, tuple[Use, bool]] = {
    "module": (lambda ids, _, m: m(ids), True),
    "function": (lambda ids, _, m: F.embedding(ids, m.weight, padding_idx=3), True),
    "by name": (lambda ids, _, m: F.embedding(weight=m.weight, input=ids), True),
    "shaped anew": (lambda ids, _, m: m(ids.view(-1, 6).contiguous()), True),
    "two batches": (lambda ids, others, m: m(ids) + m(others), True),
    "other rows": (lambda ids, _, m: m(ids + 1), False),
    "known rows": (lambda _, __, m: m(torch.arange(4)), False),
    "one of two": (lambda ids, others, m: m(ids) + m(others % 3), False),
    "all of it, too": (lambda ids, _, m: m(ids) + m.weight.mean(), False),
    "table written": (lambda ids, _, m: F.embedding(ids, m.weight, None, 0.5), False),
    "rows written": (lambda ids, _, m: m(ids.clamp_(min=3)), False),
    "view written": (lambda ids, _, m: m(ids) if ids.view(-1)[:2].fill_(5) is not None else None, False),
    "rows written later": (lambda ids, _, m: (m(ids), ids.add_(1))[0], False),
    "other numbers": (lambda ids, _, m: m(ids.view(torch.int32)), False),
    "written in between": (lambda ids, others, m: m(ids) + m(ids.add_(0)), False),
}


@pytest.mark.parametrize("name", USES)
def test_tables_of_a_graph(name: str) -> None:
    use, is_found = USES[name]
    table, found = nn.Embedding(12, 8), []
    named = [torch.randint(11, (4, 6)), torch.randint(11, (4, 6))]

    def backend(graph: Any, inputs: list[Any]) -> Any:
        places = [next((j for j, t in enumerate(named) if t is x), None) for x in inputs]
        found.extend((inputs[i] is table.weight, [places[k] for k in rows]) for i, rows in find_lookups(graph).items())
        return graph

    torch._dynamo.reset()
    torch.compile(lambda ids, others: 2 * use(ids, others, table), backend=backend)(*named)
    assert found == ([(True, [0, 1] if name == "two batches" else [0])] if is_found else [])
