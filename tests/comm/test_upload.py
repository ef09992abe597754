"""Copies to devices: right values, the right streams, and pinned memory only where it pays."""

import pytest
import torch

from everygpu.comm import upload
from everygpu.comm.upload import STAGE_FROM_BYTES, mark, receive


def arrived(parts, used):
    copies = [upload.upload(p, d) for p, d in zip(parts, used)]
    receive(copies, mark(used))
    return copies


def shapes():
    few, many = 3, STAGE_FROM_BYTES  # below and above the size that is staged
    return [(few,), (many,), (many, 0), (0,), (2, many // 4)]


@pytest.mark.parametrize("shape", shapes(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64], ids=str)
def test_copies_are_the_values(devices, shape, dtype):
    used = devices(2)
    parts = [torch.rand(shape).mul(5).to(dtype) for _ in used]
    for part, copy, device in zip(parts, arrived(parts, used), used):
        assert copy.device == device
        assert copy.cpu().equal(part)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(300, 300).t(),
        lambda: torch.rand(1, 300).expand(300, 300),
        lambda: torch.rand(300, 300, dtype=torch.complex64).conj(),
        lambda: torch.rand(300, 600)[:, ::2],
        lambda: torch.rand(8, 64, 16, 16).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "expanded", "conjugate", "strided", "channels last"],
)
def test_views(devices, make):
    used = devices(2)
    x = make()
    for copy in arrived([x] * len(used), used):
        assert copy.cpu().equal(x.resolve_conj())
        assert x.ndim < 4 or copy.is_contiguous(memory_format=torch.channels_last)


def test_the_cpu_copies_nothing():
    x = torch.rand(STAGE_FROM_BYTES)
    assert upload.upload(x, torch.device("cpu")) is x
    assert mark([torch.device("cpu")]) == []


def test_the_source_may_be_dropped_and_its_memory_used_again(devices):
    used = devices(2)
    for value in range(20):
        parts = [torch.full((STAGE_FROM_BYTES * 4,), float(value)) for _ in used]
        copies = arrived(parts, used)
        del parts
        assert all((c == value).all() for c in copies)


@pytest.mark.gpu
class TestStreams:
    @pytest.fixture
    def device(self, devices):
        return devices(2)[-1] if "cuda" in str(devices(2)) else pytest.skip("of CUDA")

    def test_a_copy_does_not_wait_for_the_computation(self, device):
        x = torch.rand(1 << 20)
        arrived([x], [device])  # warm
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            torch.cuda._sleep(2_000_000_000)
            copy = upload.upload(x, device)
            (event,) = (e for _, e in mark([device]))
            event.synchronize()
            assert not torch.cuda.current_stream(device).query(), "the copy waited"
            receive([copy], mark([device]))
        assert copy.cpu().equal(x)

    def test_the_host_does_not_wait_for_the_computation(self, device):
        x = torch.rand(1 << 20)
        arrived([x], [device])
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            torch.cuda._sleep(2_000_000_000)
            copies = arrived([x], [device])
            assert not torch.cuda.current_stream(device).query(), "the host waited"
        assert copies[0].cpu().equal(x)

    def test_memory_is_not_used_again_while_the_computation_needs_it(self, device):
        for value in range(1, 30):
            (copy,) = arrived([torch.full((1 << 20,), float(value))], [device])
            with torch.cuda.device(device):
                torch.cuda._sleep(20_000_000)
                total = copy.sum()
            del copy  # its memory may be taken by the next copy, but only after the sum
            arrived([torch.zeros(1 << 20)], [device])
            assert total.item() == value * (1 << 20)
