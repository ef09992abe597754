"""What the kernels note of sums, on the CPU under Triton's interpreter; run by test_kernels_interpreted.py."""

import itertools

import torch

from everygpu.comm import kernels, tree_sum

BLOCK = 64
LENGTHS = [BLOCK, 0, 10, BLOCK, 1]


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors])


def check(
    num_sources: int, bad: float | None, dtype: torch.dtype, *, is_whole: bool, is_shut: bool, by_tree: bool
) -> None:
    torch.manual_seed(0)
    blocks = [[torch.randn(BLOCK).to(dtype) for _ in LENGTHS] for _ in range(num_sources)]
    blocks[0][1].fill_(float("nan"))  # of length 0: not looked at
    if bad is not None:
        blocks[-1][3][5] = bad
    flat = torch.full((BLOCK * len(LENGTHS),), 7, dtype=dtype)
    squares, status, found = torch.zeros(len(LENGTHS)), torch.zeros(()), torch.zeros(3)
    found[1] = float(is_shut)
    kernels.run_add(
        torch.stack([addresses(row) for row in blocks]),
        torch.tensor(LENGTHS, dtype=torch.int32),
        addresses([flat, flat]),
        dtype=dtype,
        block=BLOCK,
        begin=0,
        index=1,
        rank=0,
        squares=squares if is_whole else None,
        status=None if is_whole else addresses([status]),
        found=None if is_whole else found,
        mark=3.0,
        by_tree=by_tree,
    )
    for k, (length, part) in enumerate(zip(LENGTHS, flat.split(BLOCK))):
        parts = [row[k][:length] for row in blocks]
        expected = tree_sum(parts, flat.device) if by_tree else sum(p.float() for p in parts)
        torch.testing.assert_close(part[:length].float(), torch.as_tensor(expected).to(dtype).float(), equal_nan=True)
        assert not by_tree or torch.equal(part[:length].nan_to_num(9), torch.as_tensor(expected).nan_to_num(9))
        assert part[length:].eq(7).all()
        if is_whole:
            torch.testing.assert_close(squares[k], torch.as_tensor(expected).float().square().sum(), equal_nan=True)
    is_found = bad is not None and not is_whole
    assert status.item() == 3.0 * (is_found and not is_shut)
    assert found.tolist() == [0.0, float(is_found or is_shut), 0.0]


if __name__ == "__main__":
    kernels.num_programs = lambda num_blocks, device, num_away: 2  # type: ignore[assignment] # several blocks for each
    cases = itertools.product(
        (1, 2, 3, 6), (None, float("nan"), float("inf")), (torch.float32, torch.float16), *[(True, False)] * 3
    )
    for num_sources, bad, dtype, is_whole, is_shut, by_tree in cases:
        check(num_sources, bad, dtype, is_whole=is_whole, is_shut=is_shut, by_tree=by_tree)
        print("as torch")
