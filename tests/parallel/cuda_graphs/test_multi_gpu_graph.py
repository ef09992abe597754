"""A graph over several GPUs, on real ones; what the captures make of it is tested with them."""

from typing import Any

import pytest
import torch

from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 2])
def test_a_first_replay_draws_what_comes_next(count: int, shared_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the streams of the capture are late with what torch queues on them when it begins to capture."""
    used = shared_gpus(count)
    begin = torch.cuda.CUDAGraph.capture_begin

    def begin_late(self: Any, *args: Any, **kwargs: Any) -> Any:
        wait(50_000_000)
        return begin(self, *args, **kwargs)

    def wait(num_cycles: int) -> None:
        for d in used:
            with torch.cuda.device(d):
                torch.cuda._sleep(num_cycles)

    def draw() -> list[torch.Tensor]:
        wait(300_000_000)
        return [torch.rand(8, device=d) for d in used]

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin_late)
    for d in used:
        torch.rand(2, device=d)
    states = torch.cuda.get_rng_state_all()
    wanted = draw()
    graph = MultiGpuGraph(used)
    drawn = graph.capture(draw)
    torch.cuda.set_rng_state_all(states)
    graph.replay()
    for d in used:
        torch.cuda.synchronize(d)
    assert all(a.equal(b) for a, b in zip(drawn, wanted))
