"""Classes made of ``DataParallel`` override scatter, replicate, parallel_apply and gather, or call them."""

import copy
import logging
from itertools import chain

import pytest
import torch
from torch import nn

import everygpu
from everygpu import DataParallel
from everygpu.errors import CallError, GatherError, OptimizerError, OptionError
from everygpu.parallel import ShardedBatch
from tests.parallel.oracle import Returning, assert_same_grads

METHODS = ["scatter", "replicate", "parallel_apply", "gather"]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x, *, scale=1.0):
        return self.last(self.norm(self.first(x)).tanh()) * scale


class Noted(DataParallel):
    """Overrides all four, notes their calls, and leaves the work to ``super()``."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)
        self.calls = []

    def scatter(self, inputs, kwargs, device_ids):
        self.calls.append(("scatter", inputs, kwargs, device_ids))
        return super().scatter(inputs, kwargs, device_ids)

    def replicate(self, module, device_ids):
        self.calls.append(("replicate", module, device_ids))
        return super().replicate(module, device_ids)

    def parallel_apply(self, replicas, inputs, kwargs):
        self.calls.append(("parallel_apply", replicas, inputs, kwargs))
        return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs, output_device):
        self.calls.append(("gather", outputs, output_device))
        return super().gather(outputs, output_device)


class InTurn(Noted):
    """Leaves ``replicate`` alone, without which replicas on one device run one after another."""

    replicate = DataParallel.replicate


class Outer(DataParallel):
    """Overrides forward as libraries do: by the four verbs."""

    num_forwards = 0

    def forward(self, *inputs, **kwargs):
        self.num_forwards += 1
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        return self.gather(self.parallel_apply(replicas, inputs, kwargs), self.output_device)


class TestOverrides:
    @pytest.mark.parametrize("engine", ["threads", "capture"])
    def test_are_called_in_torchs_order(self, devs, engine):
        model, bare = Noted(Mlp().to(devs[0]).eval(), devs, engine=engine), Mlp().to(devs[0]).eval()
        x = torch.randn(7, 3, device=devs[0])
        out = model(x, scale=2.0)
        torch.testing.assert_close(everygpu.parallel.gather(out), bare(x, scale=2.0))
        assert type(out) is ShardedBatch
        assert [call[0] for call in model.calls] == METHODS
        scatter, replicate, apply, gather = model.calls
        assert scatter[2:] == ({"scale": 2.0}, model.device_ids)
        assert scatter[1][0] is x
        assert replicate[1:] == (model.module, model.device_ids)
        assert apply[1][0] is model.module
        assert [len(args) for args in apply[2]] == [1] * 3
        assert gather[2] == model.output_device
        assert model.engine_in_use == "threads"
        model(x)
        assert model.calls[6][1][1] is apply[1][1], "replicas persist"
        model.calls.clear()
        twin = copy.deepcopy(model)
        twin(x)
        assert [call[0] for call in twin.calls] == METHODS

    @pytest.mark.parametrize("make", [Noted, Outer])
    def test_train_as_one_device(self, devs, make):
        model, bare = make(Mlp().double().to(devs[0]), devs), Mlp().double().to(devs[0])
        model.norm.eval(), bare.norm.eval()
        x = torch.randn(7, 3, device=devs[0], dtype=torch.float64)
        for m in (model, bare):
            for _ in range(2):
                m(x, scale=2.0).square().mean().backward()
        assert_same_grads(model, bare)

    @pytest.mark.parametrize("verb", METHODS)
    def test_each_by_itself(self, verb):
        model, x = DataParallel(Mlp().eval(), ["cpu"] * 2), torch.randn(5, 3)
        expected, calls = model(x), []
        plain = getattr(model, verb)
        setattr(model, verb, lambda *args: calls.append(verb) or plain(*args))
        torch.testing.assert_close(model(x), expected)
        assert calls == [verb]
        delattr(model, verb)
        torch.testing.assert_close(model(x), expected)
        assert calls == [verb]

    def test_a_fallback_speaks(self, caplog):
        caplog.set_level(logging.WARNING, logger="everygpu")
        for make, engine, said in (
            (Noted, "capture", "in threads, whatever the engine, as Noted has its own scatter and"),
            (Outer, "capture", "as Outer has its own forward."),
            (Noted, "auto", None),
            (Outer, "auto", None),
        ):
            model = make(Mlp(), ["cpu"] * 2, engine=engine)
            for _ in range(2):
                model(torch.randn(4, 3))
            assert len(caplog.records) == (said is not None)
            assert said is None or said in caplog.text
            caplog.clear()

    def test_only_scatter_counts_on_one_device(self):
        model = Noted(Mlp().eval(), ["cpu"])
        x = torch.randn(5, 3)
        torch.testing.assert_close(model(x), model.module(x))
        assert [call[0] for call in model.calls] == ["scatter"]
        other = DataParallel(nn.Identity(), ["cpu"])
        other.gather = None
        assert other(x) is x

    @pytest.mark.parametrize("num", [1, 2])
    def test_calls_without_arguments(self, num):
        class Constant(nn.Module):
            def forward(self):
                return torch.ones(1, 2)

        class Nothing(Noted):
            def scatter(self, inputs, kwargs, device_ids):
                return (), ()

        assert Noted(Constant(), ["cpu"] * num)().shape == (1, 2)
        assert Nothing(Constant(), ["cpu"] * num)().shape == (1, 2)

    def test_errors_name_the_replica(self):
        class Failing(Mlp):
            def forward(self, x):
                if len(x) == 2:
                    raise ValueError("mine")
                return x

        model = Noted(Failing(), ["cpu"] * 2)
        with pytest.raises(ValueError, match="mine") as caught:
            model(torch.randn(5, 3))
        assert "replica 1 on cpu" in str(caught.value.__cause__)
        with pytest.raises(OptionError, match="1 kwargs"):
            model.parallel_apply([model.module] * 2, [(1,), (2,)], [{}])

    @pytest.mark.parametrize(
        ("scatter", "counts"),
        [
            (lambda inputs, kwargs, device_ids: ([inputs, inputs], [kwargs]), "2 modules, 2 inputs, 1 kwargs and 2 d"),
            (lambda inputs, kwargs, device_ids: ([inputs] * 3, None), "2 modules, 3 inputs, 3 kwargs and 2 devices"),
            (lambda inputs, kwargs, device_ids: ([], [kwargs]), "0 modules, 0 inputs, 1 kwargs and 0 devices"),
        ],
    )
    def test_arguments_must_be_as_many_as_replicas(self, scatter, counts):
        model = DataParallel(Mlp(), ["cpu"] * 2)
        model.scatter = scatter
        with pytest.raises(OptionError, match=counts):
            model(torch.randn(4, 3))
        with pytest.raises(GatherError, match="at least one replica"):
            model.gather(model.parallel_apply([], [], None), "cpu")

    def test_buffers_and_seeds_are_forwards(self):
        x = torch.randn(8, 3) * torch.arange(8)[:, None]
        plain, *others = (kind(Mlp(), ["cpu"] * 3, buffers="mean") for kind in (DataParallel, Noted, Outer))
        for model in (plain, *others):
            model(x), model(x)
            torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
        torch.manual_seed(1)
        dropped = [DataParallel(nn.Dropout(), ["cpu"] * 2)(torch.ones(6, 3))]
        torch.manual_seed(1)
        dropped.append(InTurn(nn.Dropout(), ["cpu"] * 2)(torch.ones(6, 3)))
        assert torch.equal(*dropped)

    def test_a_device_without_rows(self):
        model, x = Noted(Mlp().eval(), ["cpu"] * 3, split=[1, 0, 1]), torch.randn(4, 3)
        torch.testing.assert_close(model(x), model.module(x))
        assert [len(args[0]) for args in model.calls[2][2]] == [2, 2]

    def test_frozen(self):
        model, x = Noted(Mlp().eval(), ["cpu"] * 2), torch.randn(4, 3)
        with model.frozen(), torch.no_grad():
            before = model(x).clone()
            model.last.bias.data.add_(1)  # against the promise: the second replica keeps what it has
            assert (model(x) != before).any(1).tolist() == [True, True, False, False]


class OwnApply(DataParallel):
    def parallel_apply(self, replicas, inputs, kwargs):
        return [replica(*args, **kw) for replica, args, kw in zip(replicas, inputs, kwargs)]


class OwnGather(DataParallel):
    def gather(self, outputs, output_device):
        return super().gather(outputs, output_device)


def other_shares(self, inputs, kwargs, device_ids):
    (x,) = inputs
    return [[x[:1]], x[1:]], None


def changed_shares(self, inputs, kwargs, device_ids):
    args, kwargs = super(type(self), self).scatter(inputs, kwargs, device_ids)
    return [(args[0][0][:1],), args[1]], kwargs


class TestRows:
    """Losses per replica are weighted by rows where the shares are ours."""

    x = torch.arange(5.0)[:, None]

    @pytest.mark.parametrize("make", [DataParallel, Noted, Outer, OwnApply, OwnGather])
    def test_are_known(self, make):
        out = make(Returning(torch.mean), ["cpu"] * 2)(self.x)
        assert out.shard_rows == (3, 2)
        assert out.mean() == self.x.mean()
        found = make(Returning(lambda x: [{"boxes": r.expand(int(r), 4)} for r in x]), ["cpu"] * 2)(self.x)
        assert [item["boxes"].shape[0] for item in found] == [0, 1, 2, 3, 4], "lists of one item per row are joined"

    @pytest.mark.parametrize("make", [DataParallel, OwnGather])
    def test_dont_count_where_the_caller_normalizes(self, make):
        model = make(Returning(lambda x, num_items: x.sum() / num_items), ["cpu"] * 2)
        for shape in ((2,), (2, 1)):  # as transformers' Trainer passes it
            found = model(self.x, num_items=torch.tensor([5]).expand(shape))
            torch.testing.assert_close(found.mean() * 2, self.x.mean())

    @pytest.mark.parametrize("make", [DataParallel, Outer])
    @pytest.mark.parametrize("scatter", [other_shares, changed_shares])
    def test_are_unknown_of_other_shares(self, make, scatter):
        out = type("Own", (make,), {"scatter": scatter})(Returning(torch.mean), ["cpu"] * 2)(self.x)
        assert type(out) is torch.Tensor
        assert out.tolist() == ([0.0, 2.5] if scatter is other_shares else [0.0, 3.5])

    def test_dont_count_with_joined_outputs(self):
        out = Noted(Returning(torch.mean), ["cpu"] * 2, gather="joined")(self.x)
        assert type(out) is torch.Tensor
        assert out.tolist() == [1.0, 3.5]


class TestForwardOverrides:
    def test_replicates_other_modules(self):
        model = Outer(Mlp(), ["cpu"] * 2)
        replicas = model.replicate(model.module.first, ["cpu", "cpu"])
        assert replicas[0] is model.module.first
        assert [tuple(r.weight.shape) for r in replicas] == [(4, 3)] * 2

    def test_a_kernel_over_devices(self):
        """As GPyTorch's MultiDeviceKernel: of two classes, with shares that it keeps, and a gather of its own."""

        class Kernel(nn.Module):
            def __init__(self, length=1.0, **kwargs):
                super().__init__()
                self.register_parameter("length", nn.Parameter(torch.tensor(length)))

            def forward(self, x1, x2, diag=False):
                return torch.exp(-torch.cdist(x1, x2) / self.length)

        class MultiDevice(DataParallel, Kernel):
            def __init__(self, base_kernel, device_ids, output_device=None):
                DataParallel.__init__(
                    self, module=base_kernel, device_ids=device_ids, output_device=output_device, dim=-2
                )
                self.output_device = output_device if output_device else device_ids[0]
                self.__cached = torch.empty(1)

            @property
            def base_kernel(self):
                return self.module

            def forward(self, x1, x2, **kwargs):
                if not torch.equal(x1, self.__cached):
                    self._x1_scattered, self._kwargs = self.scatter((x1,), kwargs, self.device_ids)
                    self.__cached = x1
                inputs = tuple((x1_[0], x2.to(x1_[0].device)) for x1_ in self._x1_scattered)
                replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
                return self.gather(self.parallel_apply(replicas, inputs, self._kwargs), self.output_device)

            def gather(self, outputs, output_device):
                return torch.cat([o.to(output_device) for o in outputs], self.dim)

        kernel, x = Kernel(2.0), torch.randn(7, 3, dtype=torch.float64)
        model = MultiDevice(kernel, [torch.device("cpu")] * 3)
        assert model.base_kernel is kernel
        for _ in range(2):
            kernel.zero_grad()
            out = model(x, x)
            torch.testing.assert_close(out, kernel(x, x))
            (expected,) = torch.autograd.grad(kernel(x, x).sum(), kernel.length)
            out.sum().backward()
            torch.testing.assert_close(kernel.length.grad, expected)

    def test_a_list_of_graphs(self):
        """As PyG's DataParallel: scatter takes two arguments and returns one value per replica."""

        class Graphs(DataParallel):
            def forward(self, data_list):
                for t in chain(self.module.parameters(), self.module.buffers()):
                    assert t.device == self.src_device_obj
                inputs = self.scatter(data_list, self.device_ids)
                replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
                return self.gather(self.parallel_apply(replicas, inputs, None), self.output_device)

            def scatter(self, data_list, device_ids):
                size = -(-len(data_list) // len(device_ids))
                return [torch.stack(data_list[i : i + size]) for i in range(0, len(data_list), size)]

        model = Graphs(Mlp().eval(), ["cpu"] * 3)
        graphs = list(torch.randn(7, 3))
        torch.testing.assert_close(model(graphs), model.module(torch.stack(graphs)))

    def test_a_share_of_the_devices(self, devices):
        """As BalancedDataParallel: without the first device, and with ``parallel_apply`` of another signature."""
        used = devices(3)

        class Balanced(DataParallel):
            def __init__(self, first_rows, *args, **kwargs):
                self.first_rows = first_rows
                super().__init__(*args, **kwargs)

            def forward(self, *inputs, **kwargs):
                device_ids = self.device_ids if self.first_rows else self.device_ids[1:]
                inputs, kwargs = self.scatter(inputs, kwargs, device_ids)
                replicas = self.replicate(self.module, self.device_ids)[len(self.device_ids) - len(device_ids) :]
                return self.gather(self.parallel_apply(replicas, device_ids, inputs, kwargs), self.output_device)

            def parallel_apply(self, replicas, device_ids, inputs, kwargs):
                return super().parallel_apply(replicas, inputs, kwargs)

        model, x = Balanced(0, Mlp().eval().to(used[0]), used, split=[1, 2, 1]), torch.randn(4, 3).to(used[0])
        out = model(x)
        assert [shard.device for shard in out.shards] == list(used[1:])
        torch.testing.assert_close(everygpu.parallel.gather(out), model.module(x))


class MMStyle(DataParallel):
    """As mmcv's MMDataParallel: scatter for containers of its own, and a step of the module."""

    def __init__(self, *args, dim=0, **kwargs):
        super().__init__(*args, dim=dim, **kwargs)
        self.dim = dim

    def forward(self, *inputs, **kwargs):
        return super().forward(*inputs, **kwargs)

    def scatter(self, inputs, kwargs, device_ids):
        return super().scatter(tuple(i["data"] for i in inputs), kwargs, device_ids)

    def train_step(self, *inputs, **kwargs):
        assert len(self.device_ids) == 1
        for t in chain(self.module.parameters(), self.module.buffers()):
            assert t.device == self.src_device_obj
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        return self.module.train_step(*inputs[0], **kwargs[0])


class Stepping(Mlp):
    def train_step(self, x, optimizer):
        return {"loss": self(x).square().mean(), "optimizer": optimizer}


class TestMMDataParallel:
    def test_train_step(self):
        model, x = MMStyle(Stepping(), ["cpu"]), torch.randn(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = model.train_step({"data": x}, optimizer=optimizer)
        assert found["optimizer"] is optimizer
        torch.testing.assert_close(found["loss"], model.module(x).square().mean())
        assert found["loss"].requires_grad


class TestTrainStep:
    def make(self, kind, **options):
        net = Mlp()
        net.norm = nn.Identity()
        model = kind(net, ["cpu"] * 2)
        return everygpu.TrainStep(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.1), **options)

    @pytest.mark.parametrize("kind", [Noted, Outer])
    def test_uses_overrides(self, kind):
        steps = [self.make(kind), self.make(DataParallel)]
        for _ in range(4):
            x, y = torch.randn(5, 3), torch.randn(5, 2)
            torch.testing.assert_close(*(step(x, y) for step in steps))
        for a, b in zip(*(step.model.parameters() for step in steps)):
            torch.testing.assert_close(a, b)
        if kind is Outer:
            assert steps[0].model.num_forwards == 4
        else:
            assert [call[0] for call in steps[0].model.calls] == METHODS * 4

    def test_refuses_what_would_pass_them_by(self):
        model = Noted(Mlp(), ["cpu"] * 2)
        optimizer = everygpu.ShardedOptimizer(torch.optim.SGD(model.parameters(), 0.1), ["cpu"] * 2)
        with pytest.raises(OptimizerError, match="Pass the optimizer that it was made from"):
            everygpu.TrainStep(model, nn.MSELoss(), optimizer)
        with pytest.raises(OptionError, match="Noted with its own scatter and replicate"):
            everygpu.TrainStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), capture=True)

    def test_is_made_anew_for_later_ones(self):
        step = self.make(DataParallel)
        step(torch.randn(4, 3), torch.randn(4, 2))
        step.model.scatter = step.model.scatter
        with pytest.raises(CallError, match="Make a new TrainStep"):
            step(torch.randn(4, 3), torch.randn(4, 2))
