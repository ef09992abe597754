"""What goes in: how arguments are cut, and bad input."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import (
    DeviceError,
    ModuleError,
    OptionError,
    PlacementError,
    ReplicaError,
    SplitError,
)
from tests.parallel.oracle import assert_same, pair, rows

pytestmark = pytest.mark.usefixtures("in_threads")


class GradReducer(nn.Module):
    """Needs all of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x, y, *, z):
        return self.lin(x) + 10 * y + 100 * z["z"][0]


class CountRows(nn.Module):
    """Tells, for each replica, how many rows it got of each argument."""

    def forward(self, *args, **kwargs):
        return [x.new_tensor(x.shape[0]) for x in (*args, *kwargs.values())]


class Pick(nn.Module):
    """Fails in the replica that gets a negative row."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x):
        if bool((x < 0).any()):
            raise KeyError("negative row")
        return self.lin(x)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 9, 10])
@pytest.mark.parametrize("split", ["chunk", "even"])
def test_every_replica_gets_all_arguments(devices, num_rows, split):
    devs = devices(4)
    model, bare = pair(GradReducer, devs, split=split)
    x, y, z = (rows(num_rows, width, device=devs[0], seed=width).requires_grad_() for width in (3, 2, 1))
    assert_same(model, bare, x, y=y, z={"z": [z]})


def test_zero_rows_run_one_replica_on_an_empty_shard(devices):
    devs = devices(4)
    model, bare = pair(GradReducer, devs)
    x, y, z = (rows(0, width, device=devs[0]).requires_grad_() for width in (3, 2, 1))
    run = assert_same(model, bare, x, y, z={"z": [z]})
    assert run.output.shape == (0, 2)
    (count,) = everygpu.DataParallel(CountRows(), devs)(x)
    assert count.tolist() == [0]


@pytest.mark.parametrize("num_rows", [1, 3, 7, 9])
def test_args_and_kwargs_are_cut_alike(devices, num_rows):
    devs = devices(4)
    x = rows(num_rows, 3, device=devs[0])
    first, *others = everygpu.DataParallel(CountRows(), devs)(x, x + 1, a=x + 2, b=x + 3)
    assert first.sum() == num_rows
    for other in others:
        assert other.tolist() == first.tolist()


@pytest.mark.parametrize("where", ["args", "kwargs", "nested"])
def test_tensors_of_different_size_are_an_error_naming_them(devices, where):
    devs = devices(4)
    model = everygpu.DataParallel(CountRows(), devs)
    x, y = rows(9, 3, device=devs[0]), rows(2, 3, device=devs[0])
    args, kwargs, name = {
        "args": ((x, y), {}, "args[1]"),
        "kwargs": ((x,), {"y": y}, 'kwargs["y"]'),
        "nested": ((x, {"targets": [x, y]}), {}, 'args[1]["targets"][1]'),
    }[where]
    with pytest.raises(SplitError) as caught:
        model(*args, **kwargs)
    for part in ("args[0]", name, "9", "2", "Replicated"):
        assert part in str(caught.value)
    (count,) = model(x)
    assert count.sum() == 9, "the object works at the next call"


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x, mask, scales=None):
        return self.lin(x) * mask + scales["s"][0]


def test_replicated_is_given_whole_to_every_replica(devices):
    devs = devices(3)
    model, bare = pair(Masked, devs)
    x = rows(7, 3, device=devs[0])
    masks = [rows(3, device=devs[0], seed=2).requires_grad_() for _ in range(2)]
    scales = [rows(3, device=devs[0], seed=3).requires_grad_() for _ in range(2)]
    ours = model(x, everygpu.Replicated(masks[0]), scales=everygpu.Replicated({"s": [scales[0]]}))
    theirs = bare(x, masks[1], scales={"s": [scales[1]]})
    torch.testing.assert_close(ours, theirs)
    for out in (ours, theirs):
        out.square().sum().backward()
    torch.testing.assert_close(masks[0].grad, masks[1].grad)
    torch.testing.assert_close(scales[0].grad, scales[1].grad)


class Normalizing(nn.Module):
    """Writes into its input, as image models do: ``x.div_(255)``."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x):
        x.div_(4).sub_(0.5)
        return self.lin(x)


def test_forward_may_write_into_its_input(devices):
    devs = devices(3)
    model, bare = pair(Normalizing, devs)
    assert_same(model, bare, rows(7, 3, device=devs[0]))


class Late(nn.Linear):
    """Made on the meta device; moving it gives it memory."""

    def to(self, device):
        super().to_empty(device=device)
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)
        return self


def test_a_module_that_is_elsewhere_is_moved(devices, caplog):
    devs = devices(2)
    with caplog.at_level(logging.INFO, logger="everygpu"):
        model = everygpu.DataParallel(Late(3, 2, device="meta"), devs, engine="threads")
    assert [r.levelname for r in caplog.records] == ["INFO"], "one log line"
    assert "meta" in caplog.text
    assert {p.device for p in model.parameters()} == {devs[0]}
    assert model(torch.ones(4, 3, device=devs[0])).tolist() == [[4.0, 4.0]] * 4


def test_strict_device_gives_torchs_error(devices):
    devs = devices(2)
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device") as caught:
        everygpu.DataParallel(Late(3, 2, device="meta"), devs, strict_device=True)
    assert isinstance(caught.value, PlacementError)


@pytest.mark.gpu
def test_a_module_moved_away_between_calls_is_moved_back(devices):
    devs = devices(2)
    model, bare = pair(lambda: nn.Linear(3, 2), devs)
    x = rows(5, 3, device=devs[0])
    assert_same(model, bare, x)
    model.cpu()
    bare.zero_grad()
    model.zero_grad()
    assert_same(model, bare, x)
    assert model.module.weight.device == devs[0]


def test_dtype_and_memory_format_may_change_between_calls(devices):
    devs = devices(2)
    model, bare = pair(lambda: nn.Conv2d(3, 2, 3), devs)
    x = rows(4, 3, 5, 5, device=devs[0])
    assert_same(model, bare, x)
    for m in (model, bare):
        m.zero_grad()
        m.to(memory_format=torch.channels_last)
    assert_same(model, bare, x)
    model.float()
    assert model(x.float()).dtype == torch.float32


def spread_module():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta"))


def test_bad_input_module_spread_over_devices_names_two_parameters(devices):
    devs = devices(2)
    with pytest.raises(PlacementError) as caught:
        everygpu.DataParallel(spread_module(), devs)
    for part in ("0.weight", "1.weight", "cpu", "meta", "module.to("):
        assert part in str(caught.value)
    assert str(caught.value).startswith("DataParallel: ")


def test_bad_input_module_that_becomes_spread_is_refused_at_the_call(devices):
    devs = devices(2)
    model, bare = pair(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), devs)
    x = rows(5, 3, device=devs[0])
    assert_same(model, bare, x)
    kept = copy.deepcopy(model.module[1])
    model.module[1] = nn.Linear(3, 2, device="meta")
    with pytest.raises(PlacementError, match="1.weight"):
        model(x)
    model.module[1] = kept
    torch.testing.assert_close(model(x), bare(x))


def make_script_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated; people still pass it
        return torch.jit.script(nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("make", "named", "advice"),
    [
        (lambda: torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), "optimizer SGD", "Wrap the model"),
        (lambda: torch.relu, "builtin_function_or_method", "nn.Module"),
        (lambda: lambda x: x, "function", "nn.Module"),
        (lambda: nn.Linear, "class Linear", "Call it"),
        (lambda: dict, "type", "nn.Module"),
        (make_script_module, "TorchScript", "eager module"),
        (lambda: nn.Sequential(make_script_module()), "TorchScript", "eager module"),
        (lambda: nn.LazyLinear(3), "lazy", "Run one batch"),
        (lambda: None, "NoneType", "nn.Module"),
    ],
)
@pytest.mark.parametrize(
    "take",
    [everygpu.DataParallel, everygpu.replicate, lambda m, devs: everygpu.data_parallel(m, torch.ones(4, 3), devs)],
)
def test_bad_input_something_else_than_a_module(devices, make, named, advice, take):
    with pytest.raises(ModuleError) as caught:
        take(make(), devices(2))
    assert isinstance(caught.value, TypeError)
    assert named in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.parametrize("bad_row", [0, 3, 6])
def test_bad_input_exception_in_one_replica(devices, bad_row):
    devs = devices(3)
    model, bare = pair(Pick, devs)
    x = rows(7, 3, device=devs[0]).abs()
    bad = x.clone()
    bad[bad_row] = -1
    shards = bad.chunk(len(devs))
    position = next(i for i, s in enumerate(shards) if bool((s < 0).any()))
    with pytest.raises(KeyError, match="negative row") as caught:
        model(bad)
    assert type(caught.value) is KeyError
    cause = caught.value.__cause__
    assert isinstance(cause, ReplicaError)
    for part in (f"replica {position}", str(devs[position]), str(tuple(shards[position].shape))):
        assert part in str(cause)
    assert "raise KeyError" in str(caught.traceback[-1].statement), "the traceback leads to the user's line"
    assert_same(model, bare, x)


class Chained(nn.Module):
    def forward(self, x):
        try:
            raise LookupError("first")
        except LookupError as error:
            raise ValueError("second") from error


def test_bad_input_exception_keeps_its_own_cause(devices):
    devs = devices(2)
    with pytest.raises(ValueError, match="second") as caught:
        everygpu.DataParallel(Chained(), devs)(rows(4, 3, device=devs[0]))
    assert isinstance(caught.value.__cause__, ReplicaError)
    assert isinstance(caught.value.__cause__.__cause__, LookupError)


def test_bad_input_exception_in_backward_leaves_the_object_working(devices):
    devs = devices(3)
    model, bare = pair(Pick, devs)
    x = rows(7, 3, device=devs[0]).abs()

    def refuse(grad):
        raise ArithmeticError("in backward")

    handle = model.module.lin.weight.register_hook(refuse)
    with pytest.raises(ArithmeticError, match="in backward"):
        model(x).sum().backward()
    handle.remove()
    model.zero_grad()
    assert_same(model, bare, x)


@pytest.mark.parametrize(
    "options",
    [
        {"split": "thirds"},
        {"split": [1.0]},
        {"split": [1.0, -1.0]},
        {"split": [0, 0]},
        {"split": [1.0, float("nan")]},
        {"split": [1.0, "many"]},
        {"split": 2},
        {"buffers": "last"},
        {"buffers": None},
        {"dim": "rows"},
        {"dim": 0.5},
    ],
)
def test_bad_input_wrong_option(devices, options):
    (name, value), *_ = options.items()
    with pytest.raises(OptionError) as caught:
        everygpu.DataParallel(nn.Linear(3, 2), devices(2), **options)
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "device_ids",
    [["gpu"], ["cpu", "meta"], [], [None], ["cuda:99"], [99], ["cpu:"], [-1], [1.5], "warp", 2],
)
def test_bad_input_wrong_devices(device_ids):
    with pytest.raises(DeviceError) as caught:
        everygpu.DataParallel(nn.Linear(3, 2), device_ids)
    assert isinstance(caught.value, RuntimeError)


def test_bad_input_a_number_of_devices():
    with pytest.raises(DeviceError, match=r"device_ids=2 is no list. Pass \[2\] for GPU 2 alone, \[0, 1\] for 2 GPUs"):
        everygpu.DataParallel(nn.Linear(3, 2), 2)


def test_bad_input_wrong_output_device(devices):
    with pytest.raises(DeviceError):
        everygpu.DataParallel(nn.Linear(3, 2), devices(2), output_device="cuda:99")


@pytest.mark.gpu
def test_bad_input_the_same_gpu_twice(monkeypatch):
    monkeypatch.delenv("EVERYGPU_SHARE_GPU", raising=False)
    with pytest.raises(DeviceError, match="cuda:0"):
        everygpu.DataParallel(nn.Linear(3, 2), [0, "cuda:0"])


def test_bad_input_dim_that_the_batch_does_not_have(devices):
    devs = devices(2)
    model = everygpu.DataParallel(nn.Linear(3, 2).to(devs[0]), devs, dim=2)
    with pytest.raises(SplitError, match=r"args\[0\]"):
        model(torch.ones(4, 3, device=devs[0]))
    assert model(torch.ones(1, 2, 4, 3, device=devs[0])).shape == (1, 2, 4, 2)
