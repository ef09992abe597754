"""A wrapper is copied, saved and loaded as its module is, by itself and within a larger model."""

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from everygpu import DataParallel
from tests.parallel.test_data_parallel import Net, build


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


class TestNames:
    """Names are the bare model's wherever they are asked for."""

    @pytest.mark.parametrize("wrap", [lambda net: DataParallel(net, ["cpu"] * 2), lambda net: nested(lambda _: net)])
    @pytest.mark.parametrize("inner", [lambda net: net, lambda net: torch.compile(net, backend="eager")])
    def test_are_the_bare_models(self, wrap, inner):
        net = wrap(inner(build()))
        model = nested(lambda net: DataParallel(inner(net), ["cpu"] * 2)) if isinstance(net, nn.Sequential) else net
        bare = nested(lambda net: net) if isinstance(net, nn.Sequential) else build()
        tables = "named_parameters", "named_buffers"
        assert [list(dict(getattr(model, t)())) for t in tables] == [list(dict(getattr(bare, t)())) for t in tables]
        assert list(dict(model.named_modules())) == list(dict(bare.named_modules()))
        joined = [
            f"{m}.{p}".lstrip(".") for m, x in model.named_modules() for p, _ in x.named_parameters(recurse=False)
        ]
        assert sorted(joined) == sorted(dict(model.named_parameters())) == sorted(set(joined))

    def test_a_hand_written_average(self):
        model = DataParallel(build(), ["cpu"] * 2)
        ema = {name: value.clone() for name, value in model.state_dict().items()}
        for name, p in model.named_parameters():
            ema[name].lerp_(p.detach(), 0.1)
        assert all(name in model.state_dict() for name, _ in model.named_parameters())

    def test_functional_call_takes_the_names(self):
        model, x = DataParallel(build().eval(), ["cpu"] * 2), torch.randn(4, 3)
        named = {name: p * 2 for name, p in model.named_parameters()}
        found = torch.func.functional_call(nn.Sequential(model), {f"0.{name}": p for name, p in named.items()}, x)
        torch.testing.assert_close(found, torch.func.functional_call(model.module, named, x))

    def test_what_a_subclass_has_of_its_own_is_listed(self):
        class Scaled(DataParallel):
            def __init__(self, *args):
                super().__init__(*args)
                self.scale, self.head = nn.Parameter(torch.ones(())), nn.Linear(2, 1)

        model = Scaled(build(), ["cpu"] * 2)
        names = [name for name, _ in model.named_parameters()]
        assert {"scale", "head.weight", "head.bias"} < set(names)
        assert len(names) == len(set(names)) == 7


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
