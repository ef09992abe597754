"""Copies between GPUs within a CUDA graph: small ones are made by a kernel."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from everygpu import comm
from everygpu.comm import copies
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph

pytestmark = [pytest.mark.gpu, pytest.mark.cards(2)]

SMALL: dict[str, Callable[[torch.device], Tensor]] = {
    "one number": lambda d: torch.rand((), device=d),
    "doubles": lambda d: torch.rand(3, 5, device=d, dtype=torch.float64),
    "halves": lambda d: torch.rand(1026, device=d, dtype=torch.float16),
    "counters": lambda d: torch.randint(100, (7,), device=d),
    "a mask": lambda d: torch.rand(4096, device=d) > 0.5,
    "complex numbers": lambda d: torch.rand(5, device=d, dtype=torch.complex64),
    "the largest": lambda d: torch.rand(copies.SMALL_BYTES // 4, device=d),
    "a part": lambda d: torch.rand(9, device=d)[1:],
}
OTHERS: dict[str, Callable[[torch.device], Tensor]] = {
    "odd bytes": lambda d: torch.rand(3, device=d) > 0.5,
    "between words": lambda d: torch.rand(5, device=d, dtype=torch.float16)[1:],
    "strided": lambda d: torch.rand(4, 6, device=d).t(),
    "conjugated": lambda d: torch.rand(5, device=d, dtype=torch.complex64).conj(),
    "too large": lambda d: torch.rand(copies.SMALL_BYTES // 4 + 1, device=d),
    "empty": lambda d: torch.rand(0, 3, device=d),
}


@pytest.fixture
def used() -> list[torch.device]:
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


@pytest.mark.parametrize("make", [*SMALL.values(), *OTHERS.values()], ids=[*SMALL, *OTHERS])
def test_what_is_copied_is_what_is_there_at_the_replay(
    used: list[torch.device], make: Callable[[torch.device], Tensor]
) -> None:
    sources = [make(d) for d in used]
    target = torch.zeros_like(sources[0])
    graph = MultiGpuGraph(used)

    def work() -> tuple[list[Tensor], list[Tensor], Tensor]:
        torch.zeros(1, device=used[0]).add_(1)  # torch warns of graphs without anything in them
        gathered = comm.copy_from_each(sources, used[0])
        comm.fill(target, sources[-1])
        return comm.copy_to_each(sources[0], used), gathered, comm.copy(sources[1], used[0])

    spread, gathered, one = graph.capture(work)
    for _ in range(3):
        for s in sources:
            s.copy_(make(s.device))
        graph.replay()
        assert all(t.cpu().equal(sources[0].cpu()) for t in spread)
        assert all(t.cpu().equal(s.cpu()) for t, s in zip(gathered, sources))
        assert target.cpu().equal(sources[-1].cpu())
        assert one.cpu().equal(sources[1].cpu())


@pytest.mark.parametrize("is_small", [True, False])
def test_which_copies_a_kernel_makes(used: list[torch.device], is_small: bool) -> None:
    if not comm.has_triton():
        pytest.skip("needs Triton")
    comm.connect(used)
    for make in (SMALL if is_small else OTHERS).values():
        assert copies.can_push(make(used[0]), used[1]) == is_small
    assert not copies.can_push(torch.rand(4, device=used[0]), used[0])


def test_copies_are_in_turn_with_both_devices(used: list[torch.device]) -> None:
    """What is read is what was written before, and memory is written when it is no longer needed."""
    x, y = torch.zeros(4, device=used[0]), torch.zeros(4, device=used[1])
    big = [torch.rand(2048, 2048, device=d) for d in used[:2]]

    def work() -> Tensor:
        for b in big:
            for _ in range(20):
                b.copy_((b @ b).clamp_(0, 1))  # a while
        x.add_(big[0][0, 0] * 0 + 1)
        before = y + big[1][0, 0] * 0
        comm.fill(y, x)
        return before

    work()
    graph = MultiGpuGraph(used[:2])
    before = graph.capture(work)
    for _ in range(5):
        expected = y.clone()
        graph.replay()
        assert before.equal(expected)
        assert y.cpu().equal(x.cpu())
