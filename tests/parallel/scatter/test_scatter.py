"""Batches cut into shards: nothing lost, nothing doubled, gradients back to where they came from."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from everygpu import DataParallel, Feeder, Replicated, register_batch
from everygpu.errors import DeviceError, OptionError, SplitError
from everygpu.parallel import gather, scatter
from everygpu.parallel.scatter.scatter import scatter_call

PROPERTY = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")

counts = st.integers(1, 9)


@st.composite
def splits(draw, num_devices):
    weights = st.lists(st.integers(0, 5), min_size=num_devices, max_size=num_devices).filter(lambda weights: weights[0])
    return draw(st.sampled_from(["chunk", "even"]) | weights)


@st.composite
def shapes_and_dims(draw):
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    return shape, draw(st.integers(-len(shape), len(shape) - 1))


@PROPERTY
@given(data=st.data(), count=counts, shape_and_dim=shapes_and_dims())
def test_gathered_shards_are_the_tensor(devices, data, count, shape_and_dim):
    used = devices(count)
    shape, dim = shape_and_dim
    x = torch.arange(float(np.prod(shape)), device=used[0]).reshape(shape)
    shards = scatter(x, used, dim, split=data.draw(splits(len(used))))
    joined = gather(shards, used[0], dim)
    assert joined.equal(x)
    assert joined.dtype is x.dtype


def nested(rows, device):
    """A batch in every kind of container, and what each replica must find in it unchanged."""
    return {
        "list": [torch.randn(rows, 3, device=device), (torch.arange(rows, device=device),)],
        "pair": Pair(torch.randn(rows, device=device) > 0, y=None),
        "name": "text",
        "number": 3,
    }


def test_second_derivative_passes_through(devices):
    used = devices(3)
    x = torch.randn(6, 2, device=used[0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: gather([s**3 for s in scatter(x, used)], used[0]), x)


class TestReplicated:
    @pytest.mark.parametrize("make", [lambda x: Replicated(x.expand(2)), lambda x: x], ids=["whole", "0-dim"])
    def test_gradients_are_added_up(self, devices, make):
        used = devices(3)
        w = torch.tensor(2.0, device=used[0], requires_grad=True)
        shards = scatter({"x": torch.ones(6, 2), "w": make(w)}, used)
        assert [s["w"].device for s in shards] == used
        sum((s["w"] * (i + 1)).mean().to(used[0]) for i, s in enumerate(shards)).backward()
        assert w.grad.item() == sum(range(1, len(used) + 1))

    @pytest.mark.parametrize("make", [lambda x: Replicated(x.expand(2)), lambda x: x], ids=["whole", "0-dim"])
    def test_one_replica_writing_into_it_changes_no_other(self, devices, make):
        used = devices(3)
        shards = scatter((torch.ones(6), make(torch.tensor(4.0, device=used[0]))), used)
        shards[1][1].fill_(7) if shards[1][1].ndim == 0 else shards[1][1].add_(3)
        assert [s[1].flatten()[0].item() for s in shards] == [7 if i == 1 else 4 for i in range(len(used))]

    def test_a_packed_sequence(self, devices):
        used = devices(2)
        packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
        shards = scatter((torch.ones(2), Replicated(packed)), used)
        assert [s[1].data.device for s in shards] == used
        assert [s[1].batch_sizes.tolist() for s in shards] == [[2, 1]] * 2


class TestWriting:
    """A replica may write into its shard, as the module could into its input."""

    def test_into_a_tensor_in_a_graph(self, devices):
        used = devices(3)
        leaf = torch.ones(6, 2, device=used[0], requires_grad=True)
        shards = scatter(leaf * 2, used)
        for shard in shards:
            shard.mul_(5)
        gather(shards, used[0]).sum().backward()
        assert leaf.grad.tolist() == [[10, 10]] * 6

    def test_into_one_shard_leaves_the_others_graph_alone(self, devices):
        used = devices(2)
        leaf = torch.ones(4, device=used[0], requires_grad=True)
        first, second = scatter(leaf * 1, used)
        squared = second * second
        first.zero_()
        squared.sum().backward()
        assert leaf.grad.tolist() == [0, 0, 2, 2]


def test_wrong_options():
    with pytest.raises(OptionError, match="'rows'"):
        scatter(torch.ones(4), ["cpu"] * 2, split="rows")
    with pytest.raises(DeviceError, match="device_ids is empty"):
        scatter(torch.ones(4), [])
    with pytest.raises(SplitError, match="dim 3"):
        scatter(torch.ones(4), ["cpu"] * 2, 3)


class TestScatterCall:
    def test_positions_are_those_of_the_devices(self):
        call = scatter_call((torch.arange(4),), {}, [CPU] * 3, 0, [1, 0, 1])
        assert (call.positions, call.rows, [x.tolist() for (x,) in call.args]) == ((0, 2), (2, 2), [[0, 1], [2, 3]])

    def test_without_a_tensor_everyone_runs(self):
        call = scatter_call((3,), {"mode": "x"}, [CPU] * 3, 0, "chunk")
        assert (call.rows, call.weights, call.args, call.kwargs) == (None, (1,) * 3, ((3,),) * 3, ({"mode": "x"},) * 3)

    def test_without_any_argument_the_first_runs(self):
        call = scatter_call((), {}, [CPU] * 3, 0, "chunk")
        assert (call.positions, call.rows, call.args, call.kwargs) == ((0,), None, ((),), ({},))

    def test_shards_do_not_share_their_containers(self):
        call = scatter_call(([torch.ones(2)],), {"d": {"k": 1}}, [CPU] * 2, 0, "chunk")
        assert call.args[0][0] is not call.args[1][0]
        assert call.kwargs[0]["d"] is not call.kwargs[1]["d"]


class Noise(torch.Tensor):
    """As BigGAN's: methods of its own need attributes that torch's operations leave behind."""

    def to(self, *args, **kwargs):
        moved = torch.Tensor.to(self.as_subclass(torch.Tensor), *args, **kwargs).as_subclass(Noise)
        moved.kind = self.kind
        return moved

    def detach(self):
        return self.to("cpu")


class TestSubclassesOfTensor:
    """Cut, copied and joined below the class, as in ``torch.nn.DataParallel``, where replicas receive plain tensors."""

    def noise(self, *shape):
        x = torch.randn(*shape).as_subclass(Noise)
        x.kind = "normal"
        return x

    @pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"x": [x]}, Replicated], ids=["bare", "nested", "whole"])
    @pytest.mark.parametrize("dim", [0, 1])
    @pytest.mark.parametrize("records", [True, False])
    def test_parts_are_plain_tensors(self, devices, wrap, dim, records):
        x = self.noise(4, 4)
        x.requires_grad_(records)
        with torch.set_grad_enabled(not records):
            found = [s["x"][0] if isinstance(s, dict) else s for s in scatter(wrap(x), devices(2), dim)]
        assert [(type(s), s.requires_grad) for s in found] == [(torch.Tensor, records)] * 2
        whole = x.as_subclass(torch.Tensor)
        expected = [whole] * 2 if wrap is Replicated else whole.chunk(2, dim)
        assert all(s.cpu().equal(part) for s, part in zip(found, expected))

    @pytest.mark.parametrize("num_replicas", [1, 2, 3])
    def test_calls_are_as_with_plain_ones(self, devices, num_replicas):
        used = devices(num_replicas)
        module = nn.Linear(4, 2).to(used[0])
        model = DataParallel(module, used)
        x = self.noise(6, 4)
        whole = module(x.as_subclass(torch.Tensor).to(used[0]))
        for batch in (x, x[:5], next(iter(Feeder([x], model)))):
            out = gather(model(batch)).as_subclass(torch.Tensor)
            torch.testing.assert_close(out, whole[: len(batch)])

    def test_outputs_are_joined_as_plain_ones(self, devices):
        made = [self.noise(2, 3).to(device) for device in devices(2)]
        joined = gather(made, made[0].device)
        assert type(joined) is torch.Tensor
        assert joined.equal(torch.cat([x.as_subclass(torch.Tensor).to(joined.device) for x in made]))

    def test_one_that_is_registered_is_cut_and_joined_as_it_says(self, devices):
        class Kept(Noise):
            pass

        def kept(x, like):
            x = x.as_subclass(Kept)
            x.kind = like.kind
            return x

        register_batch(
            Kept,
            split=lambda x, rows: [kept(part, x) for part in x.as_subclass(torch.Tensor).split(rows)],
            join=lambda parts: kept(torch.cat([part.as_subclass(torch.Tensor) for part in parts]), parts[0]),
            move=lambda x, device: kept(x.as_subclass(torch.Tensor).to(device), x),
        )
        x = kept(torch.randn(5, 2), self.noise(1))
        parts = scatter(x, devices(2))
        joined = gather(parts, x.device)
        assert {type(x) for x in (*parts, joined)} == {Kept}
        assert {x.kind for x in (*parts, joined)} == {"normal"}


@PROPERTY
@given(data=st.data(), count=counts, shape_and_dim=shapes_and_dims())
def test_a_part_is_contiguous_where_the_tensor_is(devices, data, count, shape_and_dim):
    used = devices(count)
    shape, dim = shape_and_dim
    kinds = [torch.contiguous_format, *([torch.channels_last] if len(shape) == 4 else [])]
    wanted = data.draw(st.sampled_from(kinds))
    x = torch.empty(shape, device=used[0]).contiguous(memory_format=wanted)
    parts = scatter([x], used, dim, split=data.draw(splits(len(used))))
    assert all(part.is_contiguous(memory_format=wanted) for (part,) in parts)


def test_parts_from_the_feeder_are_contiguous(devices):
    model = DataParallel(nn.Identity(), devices(2), dim=1)
    (batch,) = Feeder([torch.arange(12).view(3, 4)], model)
    assert [part.is_contiguous() for part in batch.shards] == [True, True]


def test_a_part_of_what_is_not_contiguous_is_laid_out_as_it_is(devices):
    x = torch.zeros(4, 6, device=devices(1)[0]).t()
    assert [part.stride() for part in scatter(x, devices(2), dim=1)] == [x.stride()] * 2
