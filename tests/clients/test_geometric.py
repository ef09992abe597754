"""torch_geometric's DataParallel, which overrides scatter for lists of graphs."""

import types

import pytest
import torch
from torch import nn

import everygpu
from tests.clients.replacing import load_again

geometric = pytest.importorskip("torch_geometric")
graphs_nn = pytest.importorskip("torch_geometric.nn")
graph_data = pytest.importorskip("torch_geometric.data")


class TorchWithoutGPUs(types.ModuleType):
    """torch for a library that writes "cuda:" before each of its devices."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def device(name):
        return torch.device(str(name).replace("cuda:cpu", "cpu"))


@pytest.fixture
def DataParallel(monkeypatch, devices):
    """torch_geometric's class, with everygpu's as its base."""
    module = load_again("torch_geometric.nn.data_parallel", monkeypatch)
    if devices(2)[0].type == "cpu":
        monkeypatch.setattr(module, "torch", TorchWithoutGPUs("torch"))
    return module.DataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = graphs_nn.GCNConv(3, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, data):
        x = self.conv(data.x, data.edge_index).relu()
        return self.out(graphs_nn.global_mean_pool(x, data.batch))


def graph(index, num_nodes):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(num_nodes, 3, generator=generator, dtype=torch.float64)
    edges = torch.randint(num_nodes, (2, 2 * num_nodes), generator=generator)
    return graph_data.Data(x=x, edge_index=edges, y=torch.tensor([index % 2]))


SIZES = (3, 5, 9, 4, 6, 2, 7)


def make(device):
    torch.manual_seed(0)
    return Net().double().to(device)


def train(model, call, device, num_steps=4):
    graphs = [graph(i, n) for i, n in enumerate(SIZES)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        output = call(graphs)
        loss = nn.functional.cross_entropy(output, torch.cat([g.y for g in graphs]).to(device))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, output.detach() + 0


def test_training_equals_one_device(DataParallel, devices):
    chosen = devices(2)
    bare = make(chosen[0])
    expected = train(bare, lambda graphs: bare(graph_data.Batch.from_data_list(graphs).to(chosen[0])), chosen[0])
    model = DataParallel(make(chosen[0]), chosen)
    assert isinstance(model, everygpu.DataParallel)
    found = train(model, model, chosen[0])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.module.state_dict(), bare.state_dict(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_graphs", [1, 2])
def test_few_graphs(DataParallel, devices, num_graphs):
    chosen = devices(2)
    graphs = [graph(i, 3) for i in range(num_graphs)]
    bare = make(chosen[0])
    expected = bare(graph_data.Batch.from_data_list(graphs).to(chosen[0]))
    torch.testing.assert_close(DataParallel(bare, chosen)(graphs) + 0, expected, rtol=1e-9, atol=1e-9)
