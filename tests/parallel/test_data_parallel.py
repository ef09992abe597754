"""The wrapper around it all: calls, construction and attributes."""

import copy
import threading

import pytest
import torch
from torch import nn

from everygpu import DataParallel, Replicated, data_parallel
from everygpu.devices.parse import device_id
from everygpu.errors import OptionError, SplitError

pytestmark = pytest.mark.usefixtures("in_threads")

gpu_only = pytest.mark.parametrize("devices", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


class Net(nn.Module):
    """Scales rows, and remembers how many it has seen."""

    def __init__(self, scale=2.0):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale = scale
        self.rows = []

    def forward(self, x, *, shift=0.0):
        self.rows.append(len(x))
        return self.norm(self.linear(x)) * self.scale + shift

    def describe(self):
        return f"scale {self.scale}"


def build(device="cpu", **options):
    torch.manual_seed(0)
    return Net(**options).eval().to(device)


class TestCalls:
    def test_equals_the_module(self, devices):
        used = devices(3)
        net = build(used[0])
        x = torch.randn(10, 3)
        torch.testing.assert_close(DataParallel(net, used)(x, shift=1.0), net(x.to(used[0]), shift=1.0))

    def test_tensor_in_a_keyword(self, devices):
        used = devices(3)
        net = build(used[0])
        x, shift = torch.randn(10, 3, device=used[0]), torch.randn(10, 1, device=used[0])
        torch.testing.assert_close(DataParallel(net, used)(x=x, shift=shift), net(x, shift=shift))

    def test_rows_of_the_first_replica_stay_with_the_module(self):
        net = build()
        model = DataParallel(net, ["cpu"] * 3)
        model(torch.randn(10, 3))
        model(torch.randn(30, 3))
        assert net.rows == [4, 10]

    def test_output_device(self, devices):
        used = devices(2)
        x = torch.randn(4, 3)
        assert DataParallel(build(), used, output_device=used[1])(x).device == used[1]
        on_cpu = DataParallel(build(), used, output_device="cpu")
        assert on_cpu.output_device == torch.device("cpu")
        assert on_cpu(x).device == torch.device("cpu")
        assert DataParallel(build(), used).output_device == device_id(used[0])

    def test_other_dim(self, devices):
        used = devices(3)

        class Columns(nn.Linear):
            def forward(self, x):
                return super().forward(x.t()).t()

        net = Columns(3, 2).to(used[0])
        x = torch.randn(3, 10, device=used[0])
        torch.testing.assert_close(DataParallel(net, used, dim=1)(x), net(x))

    def test_even_and_weighted_split(self):
        class Count(nn.Module):
            def forward(self, x):
                return torch.tensor(len(x))

        for split, rows in (("chunk", [2] * 5), ("even", [2, 2] + [1] * 6), ([1, 0, 1, 0, 0, 0, 0, 3], [2, 2, 6])):
            assert DataParallel(Count(), ["cpu"] * 8, split=split)(torch.ones(10, 1)).tolist() == rows

    def test_split_that_the_command_line_asks_for_is_for_scripts_that_do_not_say(self, monkeypatch):
        monkeypatch.setenv("EVERYGPU_SPLIT", "even")
        assert DataParallel(nn.Linear(1, 1), ["cpu"] * 2).split == "even"
        assert DataParallel(nn.Linear(1, 1), ["cpu"] * 2, split="chunk").split == "chunk"
        monkeypatch.setenv("EVERYGPU_SPLIT", "")
        assert DataParallel(nn.Linear(1, 1), ["cpu"] * 2).split == "chunk"
        monkeypatch.setenv("EVERYGPU_SPLIT", "fair")
        with pytest.raises(OptionError, match="'fair'"):
            DataParallel(nn.Linear(1, 1), ["cpu"] * 2)

    def test_without_arguments(self):
        class Weight(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))

            def forward(self):
                return self.weight * 3

        model = DataParallel(Weight(), ["cpu"] * 3)
        assert model().tolist() == [3, 3]

    def test_error_leaves_the_object_working(self, devices):
        used = devices(3)
        model = DataParallel(build(used[0]), used)
        with pytest.raises(SplitError):
            model(torch.ones(9, 3), shift=torch.ones(2))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(9, 5))
        assert model(torch.ones(9, 3)).shape == (9, 2)

    def test_module_is_replaced(self):
        model = DataParallel(build(), ["cpu"] * 2)
        x = torch.randn(4, 3)
        model(x)
        model.module = nn.Linear(3, 1)
        torch.testing.assert_close(model(x), model.module(x))


class TestOneDevice:
    def test_inputs_are_moved_and_marks_come_off(self, devices):
        (used,) = devices(1)

        class Join(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1))

            def forward(self, x, pair, *, mask):
                return x * self.weight + pair[0] + mask["m"]

        model = DataParallel(Join(), [used])
        out = model(torch.ones(2), Replicated((torch.ones(2), "text")), mask=Replicated({"m": torch.ones(2)}))
        assert out.device == used
        assert out.tolist() == [3, 3]

    def test_no_thread_and_no_copy(self):
        threads = threading.active_count()
        seen = []

        class SlotAlias(nn.Module):
            def forward(self, x):
                seen.append((x, threading.get_ident()))
                return x

        x = torch.ones(2)
        assert DataParallel(SlotAlias(), ["cpu"])(x) is x
        assert seen == [(x, threading.get_ident())]
        assert threading.active_count() == threads

    def test_outputs_are_the_modules_own(self):
        class Odd(nn.Module):
            def forward(self, x):
                return {"scalar": x.sum(), "none": None, "set": {1}}

        assert DataParallel(Odd(), ["cpu"])(torch.ones(2)) == {"scalar": torch.tensor(2.0), "none": None, "set": {1}}

    @gpu_only
    def test_output_device(self, devices):
        used = devices(2)
        out = DataParallel(build(used[0]), used[:1], output_device="cpu")(torch.ones(2, 3))
        assert out.device == torch.device("cpu")

    @gpu_only
    def test_module_moved_away_is_fetched_back(self, devices):
        used = devices(1)
        model = DataParallel(build(used[0]), used)
        model.cpu()
        assert model(torch.ones(2, 3)).device == used[0]


class TestConstruction:
    def test_repr_tells_devices_and_split(self):
        shown = repr(DataParallel(nn.Linear(1, 1), ["cpu"] * 2, split="even"))
        assert "device_ids=['cpu', 'cpu'], split='even'" in shown
        assert "(module): Linear(in_features=1" in shown

    def test_devices_are_torchs(self):
        assert DataParallel(nn.Linear(1, 1), ["cpu", torch.device("cpu")]).device_ids == [torch.device("cpu")] * 2


class TestAttributes:
    def test_missing_one_is_an_attribute_error(self):
        model = DataParallel(build(), ["cpu"] * 2)
        with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
            model.absent  # noqa: B018
        assert not hasattr(model, "__absent__")
        assert getattr(model, "absent", 5) == 5

    def test_special_methods_are_not_the_modules(self):
        class Special(nn.Linear):
            def __deepcopy__(self, memo):
                return Special(1, 1)

        twin = copy.deepcopy(DataParallel(Special(1, 1), ["cpu"]))
        assert isinstance(twin, DataParallel)

    def test_modes_and_parameters_are_the_modules(self):
        net = build()
        model = DataParallel(net, ["cpu"] * 2)
        model.train()
        assert net.training
        assert net.norm.training
        assert list(model.parameters()) == list(net.parameters())


class TestFunction:
    def test_runs_a_module_once(self, devices):
        used = devices(3)
        net = build(used[0])
        x = torch.randn(6, 3, device=used[0])
        threads = threading.active_count()
        torch.testing.assert_close(data_parallel(net, x, used), net(x))
        assert threading.active_count() == threads

    def test_arguments(self):
        class Show(nn.Module):
            def forward(self, *args, **kwargs):
                return [type(a).__name__ for a in args], sorted(kwargs), *args

        x = torch.ones(2, 2)
        for inputs, names in ((x, ["Tensor"]), ((x, x), ["Tensor"] * 2), ([x], ["list"]), (None, []), ((), [])):
            assert data_parallel(Show(), inputs, ["cpu"] * 2)[0] == names
        assert data_parallel(Show(), x, ["cpu"] * 2, module_kwargs={"a": x, "b": 1})[1] == ["a", "b"]

    def test_dim_and_output_device(self, devices):
        used = devices(2)
        x = torch.ones(3, 4)
        out = data_parallel(nn.Identity(), x, used, output_device="cpu", dim=1)
        assert out.device == torch.device("cpu")
        assert out.equal(x)

    def test_gradients(self, devices):
        used = devices(2)
        net = nn.Linear(3, 1).to(used[0])
        data_parallel(net, torch.ones(5, 3), used).sum().backward()
        assert net.weight.grad.tolist() == [[5, 5, 5]]

    def test_failure_leaves_no_thread(self):
        threads = threading.active_count()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            data_parallel(build(), torch.ones(6, 7), ["cpu"] * 3)
        assert threading.active_count() == threads
