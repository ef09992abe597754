"""The wrapper looks like its module, and to code that asks for ``torch.nn.DataParallel`` like one of those."""

import copy
import functools
import io
import pickle
import re
import threading
from collections import OrderedDict

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import everygpu
from everygpu import DataParallel, Replicated
from everygpu.devices.parse import device_id
from everygpu.errors import DeviceError, LossError, ModuleError, OptionError, RankError
from everygpu.keys import unwrap
from everygpu.parallel import data_parallel
from tests.parallel.oracle import Mlp, Returning, assert_same, rows

pytestmark = pytest.mark.usefixtures("in_threads")

CPU, CPUS = torch.device("cpu"), ["cpu"] * 3
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

    @property
    def total(self):
        return sum(p.numel() for p in self.parameters())


def build(device="cpu", **options):
    torch.manual_seed(0)
    return Net(**options).eval().to(device)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


class TestCalls:
    def test_output_device(self, devices):
        used = devices(2)
        x, bare = torch.randn(4, 3), build(used[0])
        expected = bare(x.to(used[0])).cpu()
        for given, device, shown in (
            (used[1], used[1], device_id(used[1])),
            ("cpu", CPU, CPU),
            (-1, CPU, CPU),
            (None, used[0], device_id(used[0])),
        ):
            model = DataParallel(build(used[0]), used, output_device=given)
            assert (model.output_device, model(x).device) == (shown, device)
            torch.testing.assert_close(everygpu.parallel.gather(model(x), -1), expected)
        assert [device_id(torch.device(name)) for name in ("cuda:3", "cpu")] == [3, CPU]

    def test_even_and_weighted_split(self, monkeypatch):
        count = Returning(lambda x: torch.tensor(len(x)))
        for split, sizes in (("chunk", [2] * 5), ("even", [2, 2] + [1] * 6), ([1, 0, 1, 0, 0, 0, 0, 3], [2, 2, 6])):
            assert DataParallel(count, ["cpu"] * 8, split=split)(torch.ones(10, 1)).tolist() == sizes
        # What the command line asks for is for scripts that don't say.
        for told, split in (("even", "even"), ("", "chunk")):
            monkeypatch.setenv("EVERYGPU_SPLIT", told)
            assert DataParallel(count, CPUS).split == split
            assert DataParallel(count, CPUS, split="chunk").split == "chunk"
        monkeypatch.setenv("EVERYGPU_SPLIT", "fair")
        with pytest.raises(OptionError, match="'fair'"):
            DataParallel(count, CPUS)


class TestOneDevice:
    def test_inputs_are_moved_and_marks_come_off(self, devices):
        (used,) = devices(1)
        join = Returning(lambda x, pair, *, mask: x + pair[0] + mask["m"])
        out = DataParallel(join, [used])(
            torch.ones(2), Replicated((torch.ones(2), "text")), mask=Replicated({"m": torch.ones(2)})
        )
        assert (out.device, out.tolist()) == (used, [3, 3])

    def test_no_thread_no_copy_and_the_modules_own_output(self):
        threads, seen, x = threading.active_count(), [], torch.ones(2)
        keep = Returning(lambda x: seen.append((x, threading.get_ident())) or {"scalar": x.sum(), "x": x, "set": {1}})
        out = DataParallel(keep, ["cpu"])(x)
        assert out["x"] is x
        assert (out["scalar"], out["set"]) == (torch.tensor(2.0), {1})
        assert seen == [(x, threading.get_ident())]
        assert threading.active_count() == threads

    @gpu_only
    def test_on_a_gpu(self, devices):
        used = devices(2)
        out = DataParallel(build(used[0]), used[:1], output_device="cpu")(torch.ones(2, 3))
        assert out.device == CPU
        model = DataParallel(build(used[0]), used[:1])
        model.cpu()
        assert model(torch.ones(2, 3)).device == used[0], "a module that was moved away is fetched back"


class TestFunction:
    def test_runs_a_module_once(self, devs):
        net, threads = build(devs[0]), threading.active_count()
        x = torch.randn(6, 3, device=devs[0])
        out = data_parallel(net, x, devs)
        torch.testing.assert_close(out, net(x))
        out.sum().backward()
        expected = torch.autograd.grad(net(x).sum(), net.linear.weight)[0]
        torch.testing.assert_close(net.linear.weight.grad, expected)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            data_parallel(net, torch.ones(6, 7), devs)
        assert threading.active_count() == threads

    def test_arguments(self, devices):
        show, x = Returning(lambda *args, **kwargs: ([type(a).__name__ for a in args], sorted(kwargs))), torch.ones(2)
        for inputs, names in ((x, ["Tensor"]), ((x, x), ["Tensor"] * 2), ([x], ["list"]), (None, []), ((), [])):
            assert data_parallel(show, inputs, ["cpu"] * 2)[0] == names
        assert data_parallel(show, x, ["cpu"] * 2, module_kwargs={"a": x, "b": 1})[1] == ["a", "b"]
        out = data_parallel(nn.Identity(), torch.ones(3, 4), devices(2), output_device="cpu", dim=1)
        assert out.device == CPU
        assert out.equal(torch.ones(3, 4))


class TestLikeTorchs:
    def test_class_and_attributes(self, devs):
        model = DataParallel(build(), devs, output_device=devs[1])
        assert isinstance(model, nn.DataParallel)
        assert model.module is unwrap(model)
        assert model.src_device_obj == devs[0] == model.replica_devices[0]
        assert model.device_ids == [device_id(d) for d in devs]
        assert model.dim == 0
        assert nn.DataParallel.zero_grad is nn.Module.zero_grad
        assert "split='even'" in repr(DataParallel(nn.Linear(1, 1), CPUS, split="even"))

    def test_devices_and_gather_rule_can_be_set(self):
        model = DataParallel(build(), ["cpu"] * 2)
        x = torch.randn(6, 3)
        assert type(model(x)) is everygpu.parallel.ShardedBatch
        model.device_ids, model.output_device = CPUS, "cpu"
        model.gather_rule = "joined"
        model.module.rows.clear()
        assert type(model(x)) is torch.Tensor
        assert model.module.rows == [2]
        with pytest.raises(DeviceError, match="device_ids is empty"):
            model.device_ids = []
        with pytest.raises(OptionError, match="Set gather_rule"):
            model.gather = "joined"

    def test_a_pickle_of_another_machine_gives_the_module(self):
        state = DataParallel(build(), ["cpu"]).__getstate__()
        state["replica_devices"] = torch.device("cuda", 98), torch.device("cuda", 99)
        state["_output_device"] = state["replica_devices"][1]
        twin = DataParallel.__new__(DataParallel)
        twin.__setstate__(state)
        assert (twin.device_ids, twin.output_device, type(twin.module)) == ([98, 99], 99, Net)

    def test_ours_in_the_place_of_torchs(self, monkeypatch):
        """Libraries that wrap models themselves then take it."""
        torchs, module, x = nn.DataParallel(nn.Linear(4, 2)), nn.Linear(4, 2), torch.randn(3, 4)
        monkeypatch.setattr(nn, "DataParallel", DataParallel)
        torch.testing.assert_close(nn.DataParallel(module, CPUS)(x) + 0, module(x))
        assert nn.DataParallel(torchs, CPUS).module is torchs.module


class Extended(Mlp):
    """Uses what it has been given."""

    def forward(self, x):
        for name, value in [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]:
            x = x * value if name.startswith("scale") else x + value
        x = super().forward(x)
        return self.head(x) if hasattr(self, "head") else x


def register(model, device):
    torch.manual_seed(1)
    like = {"dtype": torch.float64, "device": device}
    model.register_buffer("shift", torch.randn(3, **like))
    model.register_buffer("passing", torch.randn(3, **like), persistent=False)
    model.register_parameter("scale", nn.Parameter(torch.randn(3, **like)))
    model.scale_more = nn.Parameter(torch.randn(3, **like))
    model.add_module("head", nn.Linear(2, 3, **like))
    model.register_module("head", nn.Linear(2, 4, **like))


class TestAttributes:
    def test_are_read_and_set_where_they_are(self):
        net = build()
        net.devices, net.gather_all = "mine", 3
        model = DataParallel(net, CPUS)
        assert (model.scale, model.total, model.devices, model.gather_all) == (2.0, net.total, "mine", 3)
        model.scale = 5
        model.note, model._mark, model.split = "the module's", "a library's", "even"
        assert (net.scale, net.note, model._mark) == (5, "the module's", "a library's")
        assert not hasattr(net, "_mark")
        assert not hasattr(net, "split")
        del model.note
        assert not hasattr(net, "note")
        with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
            model.absent  # noqa: B018
        assert getattr(model, "absent", 5) == 5
        assert not hasattr(model, "__absent__")
        model.train()
        assert net.norm.training

    def test_names_of_the_wrappers_own_are_the_modules_too(self):
        own = vars(DataParallel(build(), CPUS)).keys() - vars(build()).keys()
        net = build()
        for name in own:
            setattr(net, name, "mine")
        for model in (DataParallel(net, CPUS), copy.deepcopy(DataParallel(net, CPUS))):
            assert model(torch.randn(4, 3)).shape == (4, 2)
            assert all(getattr(model.module, name) == "mine" for name in own)

    def test_special_methods_are_not_the_modules(self):
        class Special(nn.Linear):
            def __deepcopy__(self, memo):
                return Special(1, 1)

        assert isinstance(copy.deepcopy(DataParallel(Special(1, 1), ["cpu"])), DataParallel)
        empty = DataParallel.__new__(DataParallel)
        for name in ("width", "module"):
            with pytest.raises(AttributeError):
                getattr(empty, name)
        assert not hasattr(empty, "__deepcopy__")

    @pytest.mark.parametrize("used", [False, True])
    def test_what_is_registered_is_the_modules(self, devs, x, used):
        model, bare = (Extended().double().to(devs[0]) for _ in range(2))
        model = DataParallel(model, devs)
        if used:
            model(x)
        register(model, devs[0])
        register(bare, devs[0])
        assert model.shift is model.module.shift
        assert (list(model._modules), len(model._parameters), len(model._buffers)) == (["module"], 0, 0)
        bare.load_state_dict(model.state_dict())
        for _ in range(2):
            assert_same(model, bare, x)
        model.add_module("module", copy.deepcopy(bare))
        assert_same(model, bare, x)
        for name in ("first", "split"):
            with pytest.raises(KeyError, match="already exists"):
                model.register_buffer(name, torch.ones(1))

    def test_what_is_registered_is_the_compiled_modules(self):
        bare = Extended().double()
        model = DataParallel(torch.compile(bare, backend="eager"), CPUS)
        register(model, "cpu")
        assert list(bare.state_dict()) == list(model.state_dict())
        assert {"shift", "scale", "scale_more", "head.weight"} <= bare.state_dict().keys()
        assert list(model.module._modules) == ["_orig_mod"]


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
def test_a_copy_works_on_its_own(used_before):
    model = DataParallel(build(), CPUS, split="even", buffers="mean", output_device=-1, gather="joined")
    x = torch.randn(7, 3)
    expected = model(x) if used_before else model.module(x)
    for how, twin in copies(model).items():
        assert type(twin) is DataParallel
        assert (twin.split, twin.buffers_rule, twin.gather_rule) == ("even", "mean", "joined")
        assert (twin.device_ids, twin.output_device) == ([CPU] * 3, CPU)
        torch.testing.assert_close(twin(x), expected)
        if how != "copy":
            with torch.no_grad():
                twin.linear.weight.zero_()
            torch.testing.assert_close(model(x), expected)


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


class TestNames:
    """Names are the bare model's wherever they are asked for, and states load whatever prefix they have."""

    @pytest.mark.parametrize("wrapper", WRAPPERS)
    @pytest.mark.parametrize("place", [lambda wrap: wrap(build()), nested], ids=["alone", "nested"])
    def test_are_the_bare_models(self, wrapper, place):
        model, bare = place(WRAPPERS[wrapper]), place(WRAPPERS["bare"])
        assert list(model.state_dict()) == list(bare.state_dict())
        for table in ("named_parameters", "named_buffers", "named_modules"):
            assert list(dict(getattr(model, table)())) == list(dict(getattr(bare, table)()))
        joined = [
            f"{m}.{p}".lstrip(".") for m, c in model.named_modules() for p, _ in c.named_parameters(recurse=False)
        ]
        assert sorted(joined) == sorted(dict(model.named_parameters())) == sorted(set(joined))

    @pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
    def test_any_prefix_is_loaded(self, prefix):
        state = OrderedDict((prefix + k, v + 1) for k, v in build().state_dict().items())
        model, keys = DataParallel(build(), CPUS), list(state)
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert model.linear.weight.equal(build().linear.weight + 1)
        assert list(state) == keys, "the given dict is left alone"

    @pytest.mark.parametrize("target", WRAPPERS)
    @pytest.mark.parametrize("source", [*WRAPPERS, "torch's"])
    def test_any_wrapper_is_loaded(self, source, target):
        wrap = WRAPPERS.get(source, lambda net: nn.DataParallel(net, []))
        state = OrderedDict((k, v + 1) for k, v in nested(wrap).state_dict().items())
        if source == "torch's" and target == "bare":
            return  # nothing of ours takes part
        model = nested(WRAPPERS[target])
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        for value, loaded in zip(state.values(), model.state_dict().values(), strict=True):
            assert loaded.equal(value)

    @pytest.mark.parametrize(
        ("model", "path", "prefix"),
        [(DataParallel(build(), CPUS), "", "module."), (nested(WRAPPERS["ours"]), "body.", "")],
        ids=["alone", "nested"],
    )
    def test_strictness_is_torchs(self, model, path, prefix):
        state = {prefix + k: v for k, v in model.state_dict().items()}
        del state[f"{prefix}{path}linear.bias"]
        state[f"{prefix}{path}extra"] = torch.ones(1)
        with pytest.raises(RuntimeError, match=rf"(?s)Missing key.*linear.bias.*Unexpected key.*{path}extra"):
            model.load_state_dict(state)
        result = model.load_state_dict(state, strict=False)
        assert [key.replace("module.", "") for key in result.missing_keys] == [f"{path}linear.bias"]
        assert [key.replace("module.", "") for key in result.unexpected_keys] == [f"{path}extra"]

    def test_a_submodule_really_called_module(self):
        def make():
            return nested(lambda net: DataParallel(nn.Sequential(OrderedDict(module=net)), ["cpu"] * 2))

        state, model = OrderedDict((k, v + 1) for k, v in make().state_dict().items()), make()
        model.load_state_dict(state)
        assert model.state_dict()["body.module.linear.weight"].equal(state["body.module.linear.weight"])

    def test_assignment(self):
        model, state = DataParallel(build(), CPUS), {k: v.clone() for k, v in build().state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert model.linear.weight.data_ptr() == state["linear.weight"].data_ptr()

    def test_what_a_subclass_has_of_its_own_is_listed(self):
        class Scaled(DataParallel):
            def __init__(self, *args):
                super().__init__(*args)
                self.scale, self.head = nn.Parameter(torch.ones(())), nn.Linear(2, 1)

        names = [name for name, _ in Scaled(build(), CPUS).named_parameters()]
        assert {"scale", "head.weight", "head.bias"} < set(names)
        assert len(names) == len(set(names)) == 7

    def test_within_a_larger_model(self, devices):
        used = devices(2)
        wraps = WRAPPERS["bare"], lambda net: DataParallel(net, used)
        bare, model = (nested(wrap).double().to(used[0]).eval() for wrap in wraps)
        assert_same(model, bare, rows(5, 3, device=used[0]))
        outer, bare = DataParallel(nested(WRAPPERS["ours"]).eval(), CPUS), nested(WRAPPERS["bare"]).eval()
        torch.testing.assert_close(outer(torch.ones(6, 3)), bare(torch.ones(6, 3)))


class TestProcess:
    @pytest.mark.parametrize("make", [DataParallel, lambda m: everygpu.TrainStep(m, torch.mean, sgd(m))])
    def test_a_rank_without_a_meeting_place_says_so(self, monkeypatch, make):
        for name, value in {"RANK": "1", "WORLD_SIZE": "4"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        with pytest.raises(RankError, match="rank 1 of 4 .*MASTER_ADDR.*torchrun"):
            make(nn.Linear(2, 2))

    @pytest.mark.parametrize("environment", [{"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "4"}, {"RANK": "1"}])
    def test_one_alone_is_not(self, monkeypatch, environment):
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert DataParallel(nn.Linear(2, 2), CPUS)(torch.ones(4, 2)).shape == (4, 2)


class TestRewrapping:
    @pytest.mark.parametrize("wrap", [lambda m: DataParallel(m, ["cpu"] * 2), nn.DataParallel])
    def test_a_cell_that_is_run_again(self, wrap, caplog):
        module = nn.Linear(4, 2)
        optimizer, x = sgd(module), torch.randn(7, 4)
        DataParallel(module, CPUS)
        assert not caplog.records
        model = DataParallel(wrap(wrap(module)), CPUS, split="even")
        assert model.module is module
        assert [r.levelname for r in caplog.records] == ["WARNING"] * 2
        assert "taking the module out of" in caplog.text
        expected = module.weight.detach() - 0.1 * torch.autograd.grad(module(x).mean(), module.weight)[0]
        model(x).mean().backward()
        optimizer.step()
        torch.testing.assert_close(module.weight.detach(), expected)

    def test_train_step_takes_the_module_out_of_torchs(self):
        module = nn.Linear(4, 2)
        step = everygpu.TrainStep(nn.DataParallel(module), torch.mean, sgd(module))
        assert step.model.module is module

    def test_distributed_data_parallel_is_refused(self, tmp_path):
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
        try:
            model = DistributedDataParallel(nn.Linear(2, 2))
            for wrapped in (model, nn.Sequential(model)):
                with pytest.raises(ModuleError, match="got DistributedDataParallel at"):
                    DataParallel(wrapped, CPUS)
            with pytest.raises(ModuleError, match="DistributedDataParallel"):
                everygpu.TrainStep(model, torch.mean, sgd(model))
        finally:
            distributed.destroy_process_group()

    @pytest.mark.parametrize("kind", [FullyShardedDataParallel, FSDPModule])
    def test_sharded_modules_are_refused(self, kind):
        bases = (kind,) if issubclass(kind, nn.Module) else (kind, nn.Linear)
        module = object.__new__(type("Sharded", bases, {}))  # torch's constructors take a process group
        nn.Module.__init__(module)
        with pytest.raises(ModuleError, match=f"got {kind.__name__} at 'the top'"):
            DataParallel(module, CPUS)


class Scoring(nn.Module):
    """Returns its loss."""

    def __init__(self, reduce):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.reduce = reduce

    def forward(self, x):
        return self.reduce(self.linear(x).square())


class TestLoss:
    @pytest.mark.parametrize("reduce", [torch.mean, lambda y: y.mean().reshape(1)], ids=["0-dim", "(1,)"])
    def test_backward_of_one_per_replica_says_what_to_do(self, reduce):
        loss = DataParallel(Scoring(reduce), CPUS)(torch.ones(7, 4))
        with pytest.raises(LossError, match=r"one entry from each of 3 replicas.*loss\.mean\(\).*loss\.sum\(\)"):
            loss.backward()
        with pytest.raises(LossError, match=r"loss\.mean\(\)"):
            (loss * 2).backward(retain_graph=True)
        loss.backward(torch.ones_like(loss), retain_graph=True)  # torch's own way

    @pytest.mark.parametrize(
        ("read", "call"),
        [(lambda loss: loss.item(), "loss.mean().item()"), (float, "float(loss.mean())"), (int, "int(loss.mean())"),
         (lambda loss: f"{loss:.3f}", 'f"{loss.mean():.3f}"')],
    )  # fmt: skip
    def test_reading_one_per_replica_as_a_number_says_what_to_do(self, read, call):
        loss = DataParallel(Scoring(torch.mean), CPUS)(torch.ones(7, 4))
        with pytest.raises(LossError, match=f"got one entry from each of 3 replicas. Call {re.escape(call)}"):
            read(loss)
        assert f"{loss}".startswith("tensor([")
        read(loss.mean().detach())

    @pytest.mark.parametrize("reduce", [torch.mean, torch.sum])
    def test_what_it_says_gives_the_gradient_of_the_whole_batch(self, reduce):
        x, module = torch.randn(7, 4), Scoring(reduce)
        (expected,) = torch.autograd.grad(module(x), module.linear.weight)
        reduce(DataParallel(module, CPUS)(x)).backward()
        torch.testing.assert_close(module.linear.weight.grad, expected)

    def test_rows_are_no_losses(self):
        for num_rows, width in ((7, 2), (3, 1)):
            with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
                DataParallel(nn.Linear(4, width), CPUS)(torch.ones(num_rows, 4)).backward()
        DataParallel(Scoring(torch.mean), CPUS)(torch.ones(1, 4)).backward()  # of one row there is one loss


@pytest.mark.parametrize(
    ("loss", "name"),
    [(nn.MSELoss(), "MSELoss"), (None, "None"), (functools.partial(nn.functional.mse_loss), "partial")],
)
def test_train_step_shows_what_it_does(loss, name):
    module = nn.Linear(2, 2)
    step = everygpu.TrainStep(DataParallel(module, CPUS), loss, sgd(module), precision="bf16", clip_norm=1.0)
    assert repr(step).startswith(
        f"TrainStep(model=Linear, loss={name}, optimizer=SGD, device_ids=['cpu', 'cpu', 'cpu']"
    )
