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
        ({"sort": "index"}, [0, 1, 2, 3]),
        ({"sort": "utilization"}, [1, 2, 3, 0]),
        ({"min_free_memory": "50GiB"}, [1, 3, 2]),
        ({"min_free_memory": 50 * GIB + 1}, [1, 3]),
        ({"min_total_memory": "140GiB"}, [1, 3, 2, 0]),
        ({"max_utilization": 20}, [1, 2]),
        ({"max_utilization": 0}, [1]),
        ({"count": 3, "min_count": 1, "max_utilization": 20}, [1, 2]),
        ({"count": 1, "min_count": 1, "sort": "index"}, [0]),
        ({"min_free_memory": 0}, [1, 3, 2, 0]),
        ({"name": "h200"}, [1, 3, 2, 0]),
        ({"exclude": [1, 3]}, [2, 0]),
        ({"exclude": ["GPU-00000001"]}, [3, 2, 0]),
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
        ({"min_total_memory": "1TiB"}, 1, 0),
        ({"min_count": 3, "max_utilization": 20}, 3, 2),
        ({"count": 4, "min_count": 3, "max_utilization": 20}, 3, 2),
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
    assert rows[0].endswith("free memory 10.0 GiB, below 60.0 GiB")
    assert rows[1].endswith("fits")
    assert rows[2].endswith("free memory 50.0 GiB, below 60.0 GiB")
    assert rows[3].endswith("hidden")


UNLIKE = [
    make_sample(0, name="NVIDIA T400", free=3 * GIB, total_memory_bytes=4 * GIB),
    make_sample(1, name="NVIDIA A100-SXM4-40GB", free=1 * GIB, total_memory_bytes=40 * GIB),
    make_sample(2, name="NVIDIA A100-SXM4-80GB", free=2 * GIB, total_memory_bytes=80 * GIB),
]


@pytest.mark.parametrize(
    ("demand", "expected"),
    [({"name": "a100"}, [2, 1]), ({"exclude": ["t400"]}, [2, 1]), ({"name": "A100", "exclude": [2]}, [1]),
     ({"sort": "total"}, [2, 1, 0]), ({"sort": "free"}, [0, 2, 1])],
)  # fmt: skip
def test_unlike_gpus_are_chosen_by_name_and_size(demand, expected):
    assert indices(choose(UNLIKE, Demand(**demand))) == expected


@pytest.mark.parametrize(
    ("entry", "left"),
    [("4090", [1, 2]), ("1", [0, 2]), ("0", [1, 2]), ("3", [0, 1, 2]), ("GPU-00000002", [0, 1]), ("rtx 4090", [1, 2])],
)
def test_what_an_excluded_word_means(entry, left):
    names = ["NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    box = [make_sample(i, name=name) for i, name in enumerate(names)]
    assert indices(choose(box, Demand(exclude=[entry], sort="index"))) == left


def test_names_and_exclusions_are_reasons_in_the_table():
    with pytest.raises(DeviceError) as caught:
        choose(UNLIKE, Demand(count=3, name="A100", exclude=[1]))
    rows = str(caught.value).splitlines()[2:]
    assert [row.split("  ")[-1] for row in rows] == ["not named 'A100'", "excluded by 1", "fits"]


@pytest.mark.parametrize(
    ("demand", "lasting"),
    [
        ({"count": 2, "max_utilization": 5}, Demand(count=2)),
        ({"min_free_memory": 5, "min_total_memory": 3}, Demand(min_total_memory=5)),
        ({"min_free_memory": 3, "min_total_memory": 5}, Demand(min_total_memory=5)),
        ({"name": "A", "exclude": [0]}, Demand(name="A", exclude=[0])),
    ],
)
def test_what_waiting_does_not_change(demand, lasting):
    assert Demand(**demand).lasting == lasting


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
        ({"min_total_memory": "1GiB"}, "total memory unknown, below 1.0 GiB"),
        ({"max_utilization": 12.5}, "utilization unknown, above 12.5%"),
        ({}, None),
    ],
)
def test_what_is_not_known_does_not_fit(demand, fault):
    unknown = make_sample(0, free=None, utilization_pct=None)
    assert find_fault(unknown, Demand(**demand)) == fault


def test_what_is_not_known_comes_last_and_has_a_question_mark():
    unknown = make_sample(0, free=None, utilization_pct=None)
    assert [indices(choose([unknown, *BOX[1:]], Demand(sort=sort)))[-1] for sort in ("free", "utilization")] == [0, 0]
    assert format_verdicts([unknown], [None]).splitlines()[1].split()[2:] == ["NVIDIA", "H200", "?", "?", "?", "fits"]


@pytest.mark.parametrize(
    "wrong",
    [{"count": 0}, {"count": True}, {"count": 1.5}, {"count": "2"}, {"min_count": 0}, {"count": 1, "min_count": 2},
     {"max_utilization": -1}, {"max_utilization": 101}, {"sort": "speed"}, {"min_free_memory": "much"},
     {"min_free_memory": -1}, {"min_total_memory": "8 apples"}, {"exclude": "T400"}, {"exclude": [1.5]},
     {"exclude": [""]}],
)  # fmt: skip
def test_wrong_arguments(wrong):
    with pytest.raises(OptionError):
        select_devices(**wrong)


def as_visible(position, sample):
    return replace(sample, device=torch.device("cuda", position))


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """Look for reservations where there are none of this machine's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def two_visible(monkeypatch):
    """torch sees GPU 2 as cuda:0 and GPU 1, which is freer, as cuda:1."""
    devices = [as_visible(0, BOX[2]), as_visible(1, BOX[1])]
    monkeypatch.setattr(visible, "visible_devices", lambda: devices)


@pytest.fixture
def none_visible(monkeypatch):
    monkeypatch.setattr(visible, "visible_devices", list)


@pytest.mark.usefixtures("two_visible")
def test_select_gives_logical_devices():
    assert select_devices() == [torch.device("cuda:1"), torch.device("cuda:0")]
    assert select_devices(1) == [torch.device("cuda:1")]
    assert select_devices(sort="index") == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert select_devices(min_free_memory="60GiB") == [torch.device("cuda:1")]


@pytest.mark.usefixtures("two_visible")
def test_table_shows_both_indices():
    with pytest.raises(DeviceError, match=r"cuda:0 \(GPU 2\).*\n.*cuda:1 \(GPU 1\)"):
        select_devices(3)


@pytest.mark.usefixtures("two_visible")
def test_what_another_run_has_reserved_is_left_out(monkeypatch):
    holders = {BOX[1].uuid: Holder(pid=7, command="train.py")}
    monkeypatch.setattr(reserve, "find_holders", lambda: holders)
    assert select_devices() == [torch.device("cuda:0")]
    with pytest.raises(DeviceError, match=r"cuda:1 \(GPU 1\) .* reserved by process 7 \(train.py\)"):
        select_devices(2)


@pytest.mark.usefixtures("none_visible")
@pytest.mark.parametrize("sort", ["free", "index"])
def test_without_accelerator_nothing_asked_is_the_cpu(sort):
    assert select_devices(sort=sort) == [torch.device("cpu")]


@pytest.mark.usefixtures("none_visible")
@pytest.mark.parametrize(
    "asked", [{"count": 1}, {"min_count": 1}, {"min_free_memory": 0}, {"min_total_memory": 1}, {"max_utilization": 9}]
)
def test_without_accelerator_anything_asked_is_an_error(asked):
    with pytest.raises(DeviceError, match="requested GPUs. Leave the arguments out to use the CPU"):
        select_devices(**asked)


@pytest.mark.gpu
def test_real_devices():
    chosen = select_devices(min_free_memory="1GiB")
    assert sorted(device.index for device in chosen) == list(range(torch.cuda.device_count()))
    with pytest.raises(DeviceError, match="GPU 0"):
        select_devices(min_free_memory="900TiB")
