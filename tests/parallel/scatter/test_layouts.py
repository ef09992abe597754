"""Inputs that aren't dense: cut, or refused with a name and a way out."""

import pytest
import torch
from torch import nn

from everygpu import DataParallel, Feeder, Replicated, comm
from everygpu.errors import SplitError
from everygpu.parallel import gather, scatter

X = torch.arange(1.0, 25.0).view(6, 4)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        return x @ self.weight


class TestSparse:
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_rows_are_cut(self, devices, dim):
        used = devices(2)
        shards = scatter(X.to(used[0]).to_sparse(), used, dim)
        assert [s.layout for s in shards] == [torch.sparse_coo] * 2
        assert [s.device for s in shards] == used
        assert gather(shards, used[0], dim).to_dense().cpu().equal(X)

    def test_a_model(self, devices):
        used = devices(2)
        module, x = Product().to(used[0]), X.to(used[0])
        model = DataParallel(module, used, engine="threads")
        out = model(x.to_sparse())
        torch.testing.assert_close(gather(out), module(x))
        out.sum().backward()
        torch.testing.assert_close(module.weight.grad, x.sum(0)[:, None].expand(4, 3))

    @pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
    @pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
    def test_from_the_feeder(self, devices, layout):
        used = devices(2)
        (batch,) = list(Feeder([{"x": X.to_sparse(layout=layout), "y": torch.ones(6)}], used))
        assert batch["x"].device == used[0]
        assert batch["x"].to_dense().cpu().equal(X)


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning", "ignore:torch.quantize_per:UserWarning")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: X.to_sparse().requires_grad_(), "a sparse_coo tensor .*Pass x.to_dense"),
        (lambda: X.to_sparse_csr(), "a sparse_csr tensor .*Pass x.to_dense"),
        (lambda: X.to_sparse_csc(), "a sparse_csc tensor .*Pass x.to_dense"),
        (lambda: X.to_sparse_bsr((2, 2)), "a sparse_bsr tensor .*Pass x.to_dense"),
        (lambda: X.to_mkldnn(), "a mkldnn tensor .*Pass x.to_dense"),
        (lambda: torch.quantize_per_channel(X, torch.ones(4), torch.zeros(4), 1, torch.qint8), "a quantized tensor"),
        (lambda: X.to("meta"), "a meta tensor .*Make it on a device"),
    ],
    ids=["coo with gradient", "csr", "csc", "bsr", "mkldnn", "per channel", "meta"],
)
def test_what_cannot_be_cut_is_named(make, says):
    with pytest.raises(SplitError, match=says) as caught:
        scatter({"x": [make()]}, ["cpu"] * 2)
    assert 'shape (6, 4) in args[0]["x"][0]' in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_whole_on_purpose(devices):
    used = devices(2)
    shards = scatter((torch.ones(2), Replicated(X.to_sparse_csr())), used)
    assert [s[1].to_dense().cpu().equal(X) for s in shards] == [True, True]


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("x", [X.to_sparse(), X], ids=["coo", "dense"])
def test_a_device_without_memory_is_no_matter_of_layout(monkeypatch, x):
    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(comm, "copy", run_out)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        scatter((x, X.to_sparse_csr()), ["cpu"] * 2)
