"""The shards of a batch, its memory, its errors."""

import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

from everygpu.errors import GatherError
from everygpu.parallel.sharded.batch import has_shards
from tests.parallel.batches import Rows, assert_same_call, lay_out, numbers
from tests.parallel.sharded.uses import C, labels, ones


class TestShards:
    def test_are_connected_and_in_order(self) -> None:
        x = numbers(7, 2).requires_grad_()
        batch = lay_out(x, [3, 0, 4])
        first, _, last = batch.shards
        assert torch.equal(first, x[:3])
        (last * 2).sum().backward()
        assert torch.equal(x.grad, torch.cat([torch.zeros(3, 2), torch.full((4, 2), 2.0)]).double())
        assert batch.shard_dim == 0
        assert batch.shard_rows is None
        assert batch._joined.tensor is None

    def test_after_a_write_are_cut_from_the_joined_tensor(self) -> None:
        batch = lay_out(numbers(4, 2), [3, 1])
        batch[3] = 8
        assert not has_shards(batch)
        assert batch.shards[1].tolist() == [[8, 8]]

    def test_memory_is_freed_without_the_garbage_collector(self) -> None:
        gc.disable()
        try:
            batch = lay_out(numbers(4, 2), [3, 1])
            view = batch.t() * 2
            kept = weakref.ref(batch)
            del batch, view
            assert kept() is None
        finally:
            gc.enable()

    def test_a_pointer_is_refused_rather_than_null(self) -> None:
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="data"):
            lay_out(numbers(4, 2), [3, 1]).data_ptr()

    def test_data_is_not_set(self) -> None:
        with pytest.raises(GatherError, match="everygpu.parallel.gather"):
            lay_out(numbers(4, 2), [3, 1]).data = ones(4, 2)
        with pytest.raises(GatherError, match="everygpu.parallel.gather"):
            lay_out(numbers(4, 2), [3, 1]).set_(ones(4, 2))
        whole = ones(4, 2)
        whole.set_(lay_out(numbers(4, 2), [3, 1]))
        assert whole.equal(numbers(4, 2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_loss_runs_as_written(backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x, y: F.cross_entropy(x * 2, y) + x.exp().mean(), backend=backend)
    assert_same_call(compiled, (Rows(numbers(7, C), 0), labels(ones(7, 1))), [4, 3])
    assert not torch._dynamo.utils.counters["graph_break"]
