"""Versions of torch with which switches are on."""

import pytest
import torch
from torch import nn

from everygpu.parallel import switches
from everygpu.parallel.cuda_graphs import deferred_linear


@pytest.mark.parametrize(("version", "on"), [("2.11.0", True), ("2.15.0+cu132", True), ("2.16.0a0", False)])
def test_switches_are_on_for_versions_that_were_tried(monkeypatch, version, on):
    monkeypatch.setattr(torch, "__version__", version)
    assert switches.is_on(True) is on
    assert not switches.is_on(False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("on", [True, False])
def test_dynamos_graph_ends_in_its_last_product_where_it_is_off(monkeypatch, on):
    monkeypatch.setattr(deferred_linear, "is_large", lambda *_: True)
    monkeypatch.setattr(switches, "DEFERS_LINEAR", on)
    found = []

    def backend(graph, inputs):
        found.append(deferred_linear.split_off(graph) is not None)
        return graph.forward

    head = nn.Linear(3, 4)
    torch.compile(lambda x: head(x * 2), backend=backend)(torch.ones(2, 3))
    assert found == [on]
