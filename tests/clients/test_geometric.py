"""torch_geometric: its DataParallel, which overrides scatter for lists of graphs, and its batches in ours."""

import types

import pytest
import torch
from torch import nn

import everygpu
from tests.clients.replacing import load_again

geometric = pytest.importorskip("torch_geometric")
graphs_nn = pytest.importorskip("torch_geometric.nn")
graph_data = pytest.importorskip("torch_geometric.data")
graph_loader = pytest.importorskip("torch_geometric.loader")


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


class FromList(Net):
    """Makes its batch itself, of the graphs that it is called with."""

    def forward(self, graphs):
        return super().forward(graph_data.Batch.from_data_list(list(graphs)))


CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class TestOurs:
    """Graphs in a plain ``everygpu.DataParallel``: each replica gets whole graphs, by their number."""

    @pytest.mark.parametrize("feeds", [False, True])
    def test_batches_of_its_loader(self, devices, feeds):
        chosen = devices(2)
        bare = make(chosen[0])
        model = everygpu.DataParallel(bare, chosen)
        graphs = [graph(i, n) for i, n in enumerate(SIZES)]
        loader = graph_loader.DataLoader(graphs, batch_size=3)
        found = [model(batch) + 0 for batch in (everygpu.Feeder(loader, model) if feeds else loader)]
        torch.testing.assert_close(found, [bare(batch.to(chosen[0])) for batch in loader], **CLOSE)

    @pytest.mark.parametrize("kind", [list, everygpu.Rows])
    def test_lists_of_graphs(self, devices, kind):
        chosen = devices(2)
        torch.manual_seed(0)
        bare = FromList().double().to(chosen[0])
        graphs = [graph(i, n) for i, n in enumerate(SIZES)]
        expected = bare([g.clone().to(chosen[0]) for g in graphs])
        torch.testing.assert_close(everygpu.DataParallel(bare, chosen)(kind(graphs)) + 0, expected, **CLOSE)

    def test_batches_that_forward_returns(self, devices):
        class Doubling(nn.Module):
            def forward(self, batch):
                batch = batch.clone()
                batch.x = batch.x * 2
                return batch

        batch = graph_data.Batch.from_data_list([graph(i, n) for i, n in enumerate(SIZES)])
        found = everygpu.DataParallel(Doubling(), devices(2))(batch)
        assert found.num_graphs == len(SIZES)
        torch.testing.assert_close(found.x.cpu(), batch.x * 2)
        torch.testing.assert_close(found.edge_index.cpu(), batch.edge_index)

    def test_graphs_of_several_kinds(self, devices):
        class Pool(nn.Module):
            def forward(self, batch):
                return graphs_nn.global_add_pool(batch["user"].x, batch["user"].batch)

        graphs = []
        for i in range(5):
            one = graph_data.HeteroData()
            one["user"].x, one["item"].x = graph(i, i + 2).x, graph(i, i + 1).x
            one["user", "likes", "item"].edge_index = torch.tensor([[0, 1], [0, 0]])
            graphs.append(one)
        batch = graph_data.Batch.from_data_list(graphs)
        found = everygpu.DataParallel(Pool(), devices(2))(batch)
        torch.testing.assert_close((found + 0).cpu(), Pool()(batch), **CLOSE)
