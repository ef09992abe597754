"""The wrapper around it all: calls, attributes, state dicts, copies, threads and processes."""

import copy
import gc
import io
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from everygpu import DataParallel, Replicated, data_parallel
from everygpu.errors import DeviceError, EveryGPUError, ModuleError, OptionError, PlacementError, SplitError
from everygpu.parallel import forward_lock
from everygpu.parallel.scatter.split import plan_split
from tests.parallel.engines.test_threads import in_child

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
        assert DataParallel(build(), used).output_device == used[0]

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

    def test_split_where_the_first_replica_gets_nothing(self, devices):
        used = devices(3)
        weights = [0, *range(1, len(used))]
        bare, net = build(used[0]).train(), build(used[0]).train()
        model = DataParallel(net, used, split=weights, buffers="mean")
        x = torch.randn(9, 3, device=used[0])
        parts = x.split([r for r in plan_split(9, len(used), weights).rows if r])
        expected = torch.cat([bare(part) for part in parts])
        actual = model(x)
        torch.testing.assert_close(actual, expected)
        actual.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        for p, q in zip(net.parameters(), bare.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
        assert net.rows == []
        assert not net.norm.running_mean.eq(0).any()

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
    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (lambda: DataParallel(torch.optim.SGD([torch.ones(1)]), ["cpu"]), ModuleError, "got the optimizer SGD"),
            (lambda: DataParallel(lambda x: x, ["cpu"]), ModuleError, "got function"),
            (lambda: DataParallel(nn.Linear, ["cpu"]), ModuleError, r"the class Linear. Call it"),
            (lambda: DataParallel(None, ["cpu"]), ModuleError, "got NoneType"),
            (lambda: DataParallel(nn.LazyLinear(2), ["cpu"]), ModuleError, "lazy 'weight'. Run one batch"),
            (lambda: DataParallel(Net(), ["cpu"], buffers="last"), OptionError, "'first', 'mean'.* got 'last'"),
            (lambda: DataParallel(Net(), ["cpu"] * 2, split=[1]), OptionError, "2 devices"),
            (lambda: DataParallel(Net(), ["tpu:0"]), DeviceError, "'tpu:0'"),
            (lambda: DataParallel(Net(), []), DeviceError, "empty list"),
            (lambda: DataParallel(Net(), ["cpu"], output_device="tpu"), DeviceError, "'tpu'"),
        ],
    )
    def test_bad_input(self, make, error, words):
        with pytest.raises(error, match=words):
            make()

    @pytest.mark.filterwarnings("ignore:.*torch.jit")
    def test_torchscript_is_refused(self):
        net = nn.Sequential(nn.Identity(), torch.jit.script(nn.Linear(1, 1)))
        with pytest.raises(ModuleError, match="TorchScript module can't be replicated, got one at '1'"):
            DataParallel(net, ["cpu"])

    def test_module_spread_over_devices(self):
        net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
        with pytest.raises(PlacementError, match=r"'0.weight' on cpu and '1.weight' on meta"):
            DataParallel(net, ["cpu"] * 2)

    def test_strict_device(self):
        net = nn.Linear(1, 1, device="meta")
        words = r"parameters and buffers on device cpu \(device_ids\[0\]\) but found one of them on device: meta"
        with pytest.raises(PlacementError, match=words):
            DataParallel(net, ["cpu"], strict_device=True)

    def test_module_elsewhere_is_moved_with_one_line(self, devices, caplog):
        used = devices(2)
        with caplog.at_level(logging.INFO, logger="everygpu"):
            model = DataParallel(build("cpu"), used, engine="threads")
            model(torch.ones(2, 3))
        assert {p.device for p in model.parameters()} == {used[0]}
        moved = [] if used[0].type == "cpu" else [f"DataParallel: moving the module from cpu to {used[0]}"]
        assert [record.getMessage() for record in caplog.records] == moved

    def test_repr_tells_devices_and_split(self):
        shown = repr(DataParallel(nn.Linear(1, 1), ["cpu"] * 2, split="even"))
        assert "device_ids=['cpu', 'cpu'], split='even'" in shown
        assert "(module): Linear(in_features=1" in shown

    def test_devices_are_torchs(self):
        assert DataParallel(nn.Linear(1, 1), ["cpu", torch.device("cpu")]).device_ids == [torch.device("cpu")] * 2


class TestAttributes:
    def test_fall_back_to_the_modules(self):
        net = build()
        model = DataParallel(net, ["cpu"] * 2)
        assert model.linear is net.linear
        assert model.scale == 2.0
        assert model.describe() == "scale 2.0"
        assert model.rows is net.rows

    def test_missing_one_is_an_attribute_error(self):
        model = DataParallel(build(), ["cpu"] * 2)
        with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
            model.absent  # noqa: B018
        assert not hasattr(model, "__absent__")
        assert getattr(model, "absent", 5) == 5

    def test_half_made_object_does_not_recurse(self):
        empty = DataParallel.__new__(DataParallel)
        with pytest.raises(AttributeError):
            empty.anything  # noqa: B018
        with pytest.raises(AttributeError):
            empty.module  # noqa: B018

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


def copies(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
        "copy": copy.copy(model),
    }


@pytest.mark.parametrize("used_before", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "copy"])
class TestCopying:
    def test_copy_works_on_its_own(self, used_before, how):
        model = DataParallel(build(), ["cpu"] * 3, split="even", buffers="mean")
        x = torch.randn(7, 3)
        expected = model(x) if used_before else model.module(x)
        twin = copies(model)[how]
        assert type(twin) is DataParallel
        assert (twin.split, twin.buffers_rule, twin.device_ids) == ("even", "mean", model.device_ids)
        torch.testing.assert_close(twin(x), expected)
        if how != "copy":
            with torch.no_grad():
                twin.linear.weight.zero_()
            torch.testing.assert_close(model(x), expected)


class TestStateDict:
    def test_has_no_prefix(self):
        net = build()
        assert list(DataParallel(net, ["cpu"] * 2).state_dict()) == list(net.state_dict())

    @pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
    def test_loads_any_prefix(self, prefix):
        source = build(scale=1.0)
        state = OrderedDict((prefix + k, v + 1) for k, v in source.state_dict().items())
        model = DataParallel(build(), ["cpu"] * 2)
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert model.linear.weight.equal(source.linear.weight + 1)

    def test_strictness_is_torchs(self):
        model = DataParallel(build(), ["cpu"] * 2)
        state = {"module." + k: v for k, v in model.state_dict().items()}
        del state["module.linear.bias"]
        state["module.extra"] = torch.ones(1)
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*linear.bias.*Unexpected key.*extra"):
            model.load_state_dict(state)
        result = model.load_state_dict(state, strict=False)
        assert result.missing_keys == ["linear.bias"]
        assert result.unexpected_keys == ["module.extra"]

    def test_given_dict_is_left_alone(self):
        model = DataParallel(build(), ["cpu"] * 2)
        state = {"module." + k: v for k, v in model.state_dict().items()}
        keys = list(state)
        model.load_state_dict(state)
        assert list(state) == keys

    def test_loaded_values_reach_the_replicas(self, devices):
        used = devices(3)
        model = DataParallel(build(used[0]), used)
        x = torch.randn(6, 3)
        model(x)
        other = build(used[0])
        nn.init.normal_(other.linear.weight)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(x), other(x.to(used[0])))

    def test_assignment(self):
        model = DataParallel(build(), ["cpu"] * 2)
        state = {k: v.clone() for k, v in build().state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert model.linear.weight.data_ptr() == state["linear.weight"].data_ptr()


def compiled(net):
    return torch.compile(net, backend="eager")


def nested(wrap):
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(body=wrap(Net()), head=nn.Linear(2, 1)))


WRAPPERS = {
    "bare": lambda net: net,
    "ours": lambda net: DataParallel(net, ["cpu"] * 2),
    "ours around compiled": lambda net: DataParallel(compiled(net), ["cpu"] * 2),
    "ours around ours": lambda net: DataParallel(DataParallel(net, ["cpu"] * 2), ["cpu"]),
}


class TestInsideALargerModel:
    @pytest.mark.parametrize("wrapper", WRAPPERS)
    def test_state_dict_has_no_prefix(self, wrapper):
        assert list(nested(WRAPPERS[wrapper]).state_dict()) == list(nested(WRAPPERS["bare"]).state_dict())

    @pytest.mark.parametrize("target", WRAPPERS)
    @pytest.mark.parametrize("source", WRAPPERS)
    def test_loads_both_ways(self, source, target):
        state = OrderedDict((k, v + 1) for k, v in nested(WRAPPERS[source]).state_dict().items())
        model = nested(WRAPPERS[target])
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        for name, value in model.state_dict().items():
            assert value.equal(state[name]), name

    def test_loads_what_torchs_wrapper_saved(self):
        state = nested(lambda net: nn.DataParallel(net, [])).state_dict()
        assert "body.module.linear.weight" in state
        nested(WRAPPERS["ours"]).load_state_dict(state)

    def test_strictness_is_torchs(self):
        model = nested(WRAPPERS["ours"])
        state = model.state_dict()
        del state["body.linear.bias"]
        state["body.extra"] = torch.ones(1)
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*linear.bias.*Unexpected key.*body.extra"):
            model.load_state_dict(state)

    def test_submodule_really_called_module(self):
        def build_outer():
            return nested(lambda net: DataParallel(nn.Sequential(OrderedDict(module=net)), ["cpu"] * 2))

        state = OrderedDict((k, v + 1) for k, v in build_outer().state_dict().items())
        assert "body.module.linear.weight" in state
        model = build_outer()
        model.load_state_dict(state)
        assert model.state_dict()["body.module.linear.weight"].equal(state["body.module.linear.weight"])

    def test_runs(self, devices):
        used = devices(2)
        bare = nested(WRAPPERS["bare"]).eval().to(used[0])
        model = nested(lambda net: DataParallel(net, used)).eval().to(used[0])
        x = torch.randn(5, 3, device=used[0])
        torch.testing.assert_close(model(x), bare(x))


class TestObjectsCome:
    """Objects made, used and dropped leave nothing; several side by side don't meet."""

    def test_b23_hundred_objects_leave_no_thread_and_no_memory(self, devices):
        used = devices(3)
        threads, left = threading.active_count(), []
        x = torch.ones(6, 3)
        for _ in range(100):
            net = build(used[0])
            model = DataParallel(net, used)
            model(x).sum().backward()
            left += [weakref.ref(model), weakref.ref(net), weakref.ref(net.linear.weight)]
        del net, model
        deadline = time.monotonic() + 5
        while (threading.active_count() > threads or any(ref() for ref in left)) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert threading.active_count() <= threads
        assert not [ref for ref in left if ref() is not None]

    def test_dropping_one_needs_no_garbage_collector(self):
        model = DataParallel(build(), ["cpu"] * 3)
        with torch.no_grad():
            model(torch.ones(6, 3))
        left = weakref.ref(model)
        gc.disable()
        try:
            del model
            assert left() is None
        finally:
            gc.enable()

    def test_b24_two_models(self, devices):
        used = devices(3)
        models = [DataParallel(build(used[0], scale=s), used) for s in (1.0, 3.0)]
        x = torch.randn(6, 3)
        for _ in range(3):
            once, thrice = (model(x) for model in models)
            torch.testing.assert_close(once * 3, thrice)

    def test_b24_one_model_within_another(self):
        inner = DataParallel(build(), ["cpu"] * 2)
        x = torch.randn(6, 3)
        torch.testing.assert_close(DataParallel(nn.Sequential(inner), ["cpu"] * 3)(x), inner.module(x))

    def test_b24_two_threads_calling_one_model(self, devices):
        used = devices(3)
        net = build(used[0])
        model = DataParallel(net, used)
        batches = [torch.randn(n, 3, device=used[0]) for n in (5, 6, 7, 8)]
        expected = [net(x) for x in batches]
        results = [[] for _ in batches]

        def call(i):
            for _ in range(20):
                results[i].append(model(batches[i]))

        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(batches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for mine, right in zip(results, expected):
            assert len(mine) == 20
            for got in mine:
                torch.testing.assert_close(got, right)

    def test_b24_calls_of_one_model_wait_for_each_other(self):
        inside, overlaps = [], []

        class Slow(nn.Module):
            def forward(self, x):
                inside.append(x)
                time.sleep(0.005)
                overlaps.append(len(inside) - 1)
                inside.pop()
                return x

        model = DataParallel(Slow(), ["cpu"] * 2)
        threads = [threading.Thread(target=model, args=(torch.ones(2),)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert overlaps == [0] * 10

    def test_thread_that_waits_gets_its_turn_after_a_failure(self):
        model = DataParallel(build(), ["cpu"] * 2)
        outcomes = []

        def call(x):
            try:
                outcomes.append(tuple(model(x).shape))
            except RuntimeError:
                outcomes.append("failed")

        threads = [threading.Thread(target=call, args=(torch.ones(4, width),)) for width in (3, 5, 3, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, outcomes)) == ["(4, 2)", "(4, 2)", "failed", "failed"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestFork:
    """With a module that starts no OpenMP threads: in a forked child those hang, also without us."""

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([3.0]))
            self.inside, self.leave = threading.Event(), threading.Event()

        def forward(self, x):
            self.inside.set()
            self.leave.wait(20)
            return x * self.weight

    def test_b24_after_use(self):
        net = self.Slow()
        net.leave.set()
        model = DataParallel(net, ["cpu"] * 3)
        x = torch.ones(6)
        model(x).sum().backward()

        def train():
            net.weight.grad = None
            model(x).sum().backward()
            return net.weight.grad.item() == 6

        assert in_child(train)
        assert train()

    def test_b24_while_another_thread_is_in_forward(self):
        net = self.Slow()
        inside, leave = net.inside, net.leave
        model = DataParallel(net, ["cpu"] * 2)
        x = torch.ones(4)
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        inside.wait(10)
        try:
            fine = in_child(lambda: leave.set() or model(x).equal(x * 3), seconds=3)
        finally:
            leave.set()
            thread.join()
        assert fine, "the child hung or was wrong"


CALL_ITSELF = """
import torch, everygpu
from everygpu.errors import EveryGPUError

class Net(torch.nn.Module):
    def forward(self, x):
        return model(x) if {condition} else x

model = everygpu.DataParallel(Net(), ["cpu"] * 3)
try:
    model(torch.arange(6.0))
except EveryGPUError as error:
    print(error)
print("works" if everygpu.DataParallel(torch.nn.Identity(), ["cpu"] * 3)(torch.ones(3)).equal(torch.ones(3)) else "")
"""


class TestRecursion:
    def test_forward_within_its_own_forward_is_an_error(self):
        class Net(nn.Module):
            deep = True

            def forward(self, x):
                return model(x) if self.deep else x

        model = DataParallel(Net(), ["cpu"] * 2)
        with pytest.raises(EveryGPUError, match="can't be called from within its own forward. Call the inner module"):
            model(torch.ones(2))
        model.module.deep = False
        assert model(torch.ones(2)).tolist() == [1, 1]

    @pytest.mark.parametrize("condition", ["True", "x[0] > 1", "x[0] > 3"], ids=["all", "second", "third"])
    def test_in_any_replica(self, condition):
        # In a process of its own: a replica that waits for its own turn waits forever.
        code = CALL_ITSELF.replace("{condition}", condition)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=10, check=True)
        assert "from within its own forward" in done.stdout
        assert "works" in done.stdout


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


class InterruptedOnce:
    """A context variable after whose first change Ctrl-C comes."""

    def __init__(self, variable):
        self.get, self.reset, self._set, self._is_due = variable.get, variable.reset, variable.set, True

    def set(self, value):
        token = self._set(value)
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt
        return token


def test_interrupt_at_the_begin_of_a_forward_leaves_the_wrapper_usable(monkeypatch):
    model = DataParallel(nn.Linear(3, 2), ["cpu"] * 2)
    x = torch.randn(4, 3)
    monkeypatch.setattr(forward_lock, "_running", InterruptedOnce(forward_lock._running))
    with pytest.raises(KeyboardInterrupt):
        model(x)
    torch.testing.assert_close(model(x), model.module(x))
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(model(x)))
    thread.start()
    thread.join(10)
    torch.testing.assert_close(outputs[0], model.module(x))
