"""tensordict: its batches are cut by rows and joined again."""

import pytest
import torch
from torch import nn

import everygpu

tensordict = pytest.importorskip("tensordict")
tensordict_nn = pytest.importorskip("tensordict.nn")


def test_module_that_reads_and_writes_one(devices):
    torch.manual_seed(0)
    chosen = devices(2)
    bare = tensordict_nn.TensorDictModule(nn.Linear(3, 2), in_keys=["x"], out_keys=["y"]).to(chosen[0])
    batch = tensordict.TensorDict({"x": torch.randn(5, 3), "more": {"row": torch.arange(5)}}, batch_size=[5])
    found = everygpu.DataParallel(bare, chosen)(batch.clone())
    expected = bare(batch.clone().to(chosen[0]))
    assert isinstance(found, tensordict.TensorDict)
    assert found.batch_size == (5,)
    torch.testing.assert_close(found["y"], expected["y"])
    assert found["more", "row"].tolist() == list(range(5))
    found["y"].sum().backward()
    torch.testing.assert_close(bare.module.weight.grad, batch["x"].sum(0).expand(2, 3).to(chosen[0]))
