"""The choice of devices, and the table that explains a refusal."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everygpu.devices import reserve, visible
from everygpu.devices.reserve import Holder
from everygpu.devices.select import Demand, choose, find_fault, format_verdicts, select_devices
from everygpu.errors import DeviceError, OptionError
from tests.devices.fake_nvml import GIB, make_sample


def indices(chosen):
    return [sample.index for sample in chosen]


BOX = [
    make_sample(0, free=10 * GIB, utilization_pct=90.0),
    make_sample(1, free=100 * GIB, utilization_pct=0.0),
    make_sample(2, free=50 * GIB, utilization_pct=20.0),
    make_sample(3, free=100 * GIB, utilization_pct=40.0),
]


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        ({}, [1, 3, 2, 0]),
        ({"count": 1}, [1]),
        ({"count": 2}, [1, 3]),
        ({"min_free_memory": "50GiB"}, [1, 3, 2]),
        ({"min_free_memory": 50 * GIB + 1}, [1, 3]),
        ({"max_utilization": 20}, [1, 2]),
        ({"max_utilization": 0}, [1]),
        ({"min_free_memory": 0}, [1, 3, 2, 0]),
        ({"name": "h200"}, [1, 3, 2, 0]),
        ({"exclude": [1, 3]}, [2, 0]),
        ({"exclude": [7, "T400"]}, [1, 3, 2, 0]),
    ],
)
def test_which_are_chosen(demand, expected):
    assert indices(choose(BOX, Demand(**demand))) == expected


@pytest.mark.parametrize(
    ("demand", "required", "fit"),
    [
        ({"count": 5}, 5, 4),
        ({"count": 3, "max_utilization": 20}, 3, 2),
        ({"min_free_memory": "101GiB"}, 1, 0),
    ],
)
def test_too_few_is_an_error_with_both_numbers(demand, required, fit):
    with pytest.raises(DeviceError, match=rf"Found {fit} of {required} requested GPUs\. Ask for fewer"):
        choose(BOX, Demand(**demand))


def test_refusal_names_every_device_and_its_reason():
    with pytest.raises(DeviceError) as caught:
        choose(BOX, Demand(count=4, min_free_memory="60GiB"), {3: "hidden"})
    _, header, *rows = str(caught.value).splitlines()
    assert header.split() == ["device", "name", "free", "total", "busy", "verdict"]
    assert [row.split("  ")[1] for row in rows] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    too_little = [f"free memory {size}.0 GiB, below 60.0 GiB" for size in (10, 50)]
    assert [row.split("  ")[-1].strip() for row in rows] == [too_little[0], "fits", too_little[1], "hidden"]


@pytest.mark.parametrize(
    ("demand", "left"),
    [
        ({"exclude": ["4090"]}, [1, 2]),
        ({"exclude": ["1"]}, [0, 2]),
        ({"exclude": ["3"]}, [0, 1, 2]),  # not the one of HBM3
        ({"exclude": ["GPU-00000002"]}, [0, 1]),
        ({"exclude": ["rtx 4090"]}, [1, 2]),
        ({"name": "h100"}, [1]),
        ({"name": "NVIDIA H", "exclude": [2]}, [1]),
    ],
)
def test_what_names_and_exclusions_mean(demand, left):
    names = ["NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    box = [make_sample(i, name=name) for i, name in enumerate(names)]
    assert indices(choose(box, Demand(**demand))) == left


def test_names_and_exclusions_are_reasons():
    assert find_fault(BOX[0], Demand(name="A100")) == "not named 'A100'"
    assert find_fault(BOX[1], Demand(exclude=[1])) == "excluded by 1"


@given(
    free=st.lists(st.none() | st.integers(0, 99), min_size=1, max_size=8),
    count=st.none() | st.integers(1, 8),
    least=st.integers(0, 99),
)
def test_the_freest_that_fit_or_an_error(free, count, least):
    box = [make_sample(index, free=number) for index, number in enumerate(free)]
    fitting = sorted((number for number in free if number is not None and number >= least), reverse=True)
    demand = Demand(count=count, min_free_memory=least)
    if len(fitting) < (count or 1):
        with pytest.raises(DeviceError):
            choose(box, demand)
    else:
        assert [sample.free_memory_bytes for sample in choose(box, demand)] == fitting[:count]


@pytest.mark.parametrize(
    ("demand", "fault"),
    [
        ({"min_free_memory": 1}, "free memory unknown, below 1 B"),
        ({"max_utilization": 12.5}, "utilization unknown, above 12.5%"),
        ({}, None),
    ],
)
def test_what_is_not_known_does_not_fit(demand, fault):
    unknown = make_sample(0, free=None, utilization_pct=None)
    assert find_fault(unknown, Demand(**demand)) == fault
    assert indices(choose([unknown, *BOX[1:]], Demand()))[-1] == 0
    assert format_verdicts([unknown], [None]).splitlines()[1].split()[2:] == ["NVIDIA", "H200", "?", "?", "?", "fits"]


@pytest.mark.parametrize(
    "wrong",
    [{"count": 0}, {"count": True}, {"count": 1.5}, {"count": "2"},
     {"max_utilization": -1}, {"max_utilization": 101}, {"min_free_memory": "much"},
     {"min_free_memory": -1}, {"exclude": "T400"}, {"exclude": [1.5]}, {"exclude": [""]}],
)  # fmt: skip
def test_wrong_arguments(wrong):
    with pytest.raises(OptionError):
        select_devices(**wrong)


@pytest.fixture
def visible_gpus(monkeypatch, tmp_path):
    """What torch sees, first GPU 2 as cuda:0 and GPU 1, which is freer, as cuda:1; and no reservations."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = [replace(BOX[2], device=torch.device("cuda", 0)), replace(BOX[1], device=torch.device("cuda", 1))]
    monkeypatch.setattr(visible, "visible_devices", lambda: found)
    return found


@pytest.mark.usefixtures("visible_gpus")
def test_select_gives_logical_devices():
    assert select_devices() == [torch.device("cuda:1"), torch.device("cuda:0")]
    assert select_devices(1) == [torch.device("cuda:1")]
    assert select_devices(min_free_memory="60GiB") == [torch.device("cuda:1")]
    with pytest.raises(DeviceError, match=r"cuda:0 \(GPU 2\).*\n.*cuda:1 \(GPU 1\)"):
        select_devices(3)


@pytest.mark.usefixtures("visible_gpus")
def test_what_another_run_has_reserved_is_left_out(monkeypatch):
    holders = {BOX[1].uuid: Holder(pid=7, command="train.py")}
    monkeypatch.setattr(reserve, "find_holders", lambda: holders)
    assert select_devices() == [torch.device("cuda:0")]
    with pytest.raises(DeviceError, match=r"cuda:1 \(GPU 1\) .* reserved by process 7 \(train.py\)"):
        select_devices(2)


def test_without_accelerator_nothing_asked_is_the_cpu_and_anything_else_an_error(visible_gpus):
    visible_gpus.clear()
    assert select_devices() == [torch.device("cpu")]
    for asked in ({"count": 1}, {"min_free_memory": 0}, {"max_utilization": 9}):
        with pytest.raises(DeviceError, match="requested GPUs. Leave the arguments out to use the CPU"):
            select_devices(**asked)


@pytest.mark.gpu
@pytest.mark.alone
def test_real_devices():
    chosen = select_devices(min_free_memory="1GiB")
    assert sorted(device.index for device in chosen) == list(range(torch.cuda.device_count()))
    with pytest.raises(DeviceError, match="GPU 0"):
        select_devices(min_free_memory="900TiB")
