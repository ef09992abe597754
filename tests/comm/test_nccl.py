"""NCCL where there are GPUs, and where it must not be used."""

import pytest
import torch

from everygpu.comm import nccl

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def gpus():
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def test_cpu_buffers_are_not_for_nccl():
    assert not nccl.can_serve([torch.ones(1), torch.ones(1)])


@pytest.mark.gpu
@pytest.mark.cards(2)  # torch.cuda.nccl takes one tensor a card
class TestOnGpus:
    def test_needs_different_devices(self, monkeypatch):
        here = [torch.ones(2, device=d) for d in gpus()]
        assert nccl.can_serve(here)
        assert not nccl.can_serve([*here, here[0]])
        assert not nccl.can_serve(here[:1])
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
        assert not nccl.can_serve(here)

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool])
    def test_broadcast(self, dtype):
        devices = gpus()
        source = torch.arange(1000, device=devices[0]).to(dtype)
        targets = [torch.zeros(1000, dtype=dtype, device=d) for d in devices[1:]]
        nccl.broadcast(source, targets)
        assert all(t.cpu().equal(source.cpu()) for t in targets)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_reduce(self, dtype):
        devices = gpus()
        sources = [torch.full((1000,), i + 1, dtype=dtype, device=d) for i, d in enumerate(devices[1:])]
        total = nccl.reduce(sources, devices[0])
        assert total.device == devices[0]
        assert total.cpu().equal(torch.full((1000,), sum(range(1, len(devices))), dtype=dtype))

    def test_waits_for_the_work_before_it(self):
        devices = gpus()
        buffers = [torch.zeros(1 << 20, device=d) for d in devices[1:]]
        for b in buffers:
            torch.cuda._sleep(50_000_000)
            b.fill_(1)
        assert nccl.reduce(buffers, devices[0]).cpu().unique().tolist() == [len(buffers)]
