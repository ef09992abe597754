"""Kernels over several GPUs' memory; what captures make of them is tested with these."""

from typing import Any

import pytest
import torch
from torch import Tensor

from everygpu import comm
from everygpu.comm.streams import synchronize_streams
from everygpu.parallel.cuda_graphs.transfer import DTYPES

pytestmark = pytest.mark.gpu

BLOCK = 256
LENGTHS = [BLOCK, BLOCK, 100, 0, 1, BLOCK]


@pytest.fixture
def used(shared_gpus: Any) -> list[torch.device]:
    if not comm.has_triton():
        pytest.skip("needs Triton")
    found: list[torch.device] = shared_gpus(max(2, torch.cuda.device_count()))
    comm.connect(found)
    return found


def addresses(tensors: list[Tensor], device: torch.device) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], device=device)


def make_blocks(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Memory for each block; those of length 0 must not be looked at."""
    return [torch.randn(BLOCK, device=device).to(dtype) for _ in LENGTHS]


def table(blocks: list[Tensor], device: torch.device) -> Tensor:
    return addresses(blocks, device) * torch.tensor([min(n, 1) for n in LENGTHS], device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_sent_to_all(used: list[torch.device], dtype: torch.dtype) -> None:
    from everygpu.comm import kernels

    blocks, lengths = make_blocks(dtype, used[0]), torch.tensor(LENGTHS, dtype=torch.int32)
    flats = [torch.zeros(BLOCK * (len(LENGTHS) + 1), dtype=dtype, device=d) for d in used[1:]]
    synchronize_streams(used)
    for rank, d in enumerate(used[1:]):
        with torch.cuda.device(d):
            kernels.run_send(
                table(blocks, d), lengths.to(d), addresses(flats, d), dtype=dtype, block=BLOCK, begin=BLOCK, rank=rank
            )
    synchronize_streams(used)
    for flat in flats:
        assert not flat[:BLOCK].any()
        for block, length, found in zip(blocks, LENGTHS, flat[BLOCK:].cpu().split(BLOCK)):
            assert found[:length].equal(block[:length].cpu())
            assert not found[length:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_sources", [1, 2, 8])
def test_blocks_are_added_up(used: list[torch.device], dtype: torch.dtype, num_sources: int) -> None:
    from everygpu.comm import kernels

    sources, lengths = used[:num_sources], torch.tensor(LENGTHS, dtype=torch.int32)
    blocks = [make_blocks(dtype, d) for d in sources]
    flat = torch.full((BLOCK * len(LENGTHS),), 7, dtype=dtype, device=used[0])
    for rank, d in enumerate(sources):
        flat.fill_(7)
        synchronize_streams(used)
        rows = torch.stack([table(row, d) for row in blocks])
        with torch.cuda.device(d):
            targets = torch.tensor([0, flat.data_ptr()], device=d)
            kernels.run_add(rows, lengths.to(d), targets, dtype=dtype, block=BLOCK, begin=0, index=1, rank=rank)
        synchronize_streams(used)
        for k, (length, found) in enumerate(zip(LENGTHS, flat.cpu().split(BLOCK))):
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            expected = sum(row[k][:length].cpu().to(wide) for row in blocks)
            torch.testing.assert_close(found[:length], torch.as_tensor(expected).to(dtype))
            assert found[length:].eq(7).all()


def test_what_movers_use_kernels_for(used: list[torch.device]) -> None:
    from everygpu.comm import kernels

    assert set(kernels.KINDS) == set(DTYPES)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("num_sources", [1, 2, 8])
def test_sums_are_looked_at(used: list[torch.device], num_sources: int, bad: float | None) -> None:
    from everygpu.comm import kernels

    sources, lengths = used[:num_sources], torch.tensor(LENGTHS, dtype=torch.int32)
    blocks = [make_blocks(torch.float32, d) for d in sources]
    if bad is not None:
        blocks[-1][2][99] = bad
    flat = torch.zeros(BLOCK * len(LENGTHS), device=used[0])
    status, found = torch.zeros((), device=used[0]), torch.zeros(2, device=used[0])
    squares = torch.zeros(len(LENGTHS), device=used[0])
    synchronize_streams(used)
    kernels.run_add(
        torch.stack([table(row, used[0]) for row in blocks]),
        lengths.to(used[0]),
        addresses([flat], used[0]),
        dtype=torch.float32,
        block=BLOCK,
        begin=0,
        index=0,
        rank=0,
        squares=squares,
        status=addresses([status], used[0]),
        found=found,
        mark=3.0,
    )
    synchronize_streams(used)
    expected = [float(part[:n].square().sum()) for n, part in zip(LENGTHS, flat.split(BLOCK))]
    torch.testing.assert_close(squares.tolist(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert status.item() == 3.0 * (bad is not None)
    assert found.tolist() == [float(bad is not None), 0.0]
