"""The GPUs that ``everygpu run`` chooses."""

from dataclasses import replace

import click
import pytest

from everygpu.cli.choose import Plan, plan_run
from everygpu.cli.options import read_request
from everygpu.devices import nvml
from everygpu.devices.select import Demand
from everygpu.errors import DeviceError
from tests.devices.fake_nvml import GIB, make_sample

BOX = [make_sample(0, free=10 * GIB), make_sample(1, free=90 * GIB), make_sample(2, free=50 * GIB)]
UUIDS = [sample.uuid for sample in BOX]


def parse_request(text):
    return read_request(None, None, text)


CPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("auto", Demand()),
        ("1", Demand(count=1)),
        ("12", Demand(count=12)),
        ("0,2", Demand(indices=(0, 2))),
        ("2,0", Demand(indices=(2, 0))),
        ("0,", Demand(indices=(0,))),
        ("3,", Demand(indices=(3,))),
    ],
)
def test_what_gpus_says(text, request_):
    assert parse_request(text) == request_


@pytest.mark.parametrize("text", ["", "0", "-1", "all", "1.5", ",", "0,,1", "0;1", "0,1,0", "GPU-1", "0, 1"])
def test_what_gpus_cannot_say(text):
    with pytest.raises(click.BadParameter, match="auto|twice") as caught:
        parse_request(text)
    assert repr(text) in str(caught.value.message)


@pytest.fixture
def plan(monkeypatch):
    """Plan a run on a box of samples; None stands for a machine without a driver."""

    def make(gpus="auto", *, min_free=None, samples=BOX, **environ):
        monkeypatch.setattr(nvml, "sample_devices", lambda: samples)
        return plan_run(replace(parse_request(gpus), min_free_memory=min_free), environ, share=True)

    return make


@pytest.mark.parametrize(
    ("gpus", "min_free", "environ", "expected"),
    [
        ("auto", None, {}, [1, 2, 0]),
        ("auto", "20GiB", {}, [1, 2]),
        ("2", None, {}, [1, 2]),
        ("2,0", None, {}, [2, 0]),
        ("0,1", None, {}, [0, 1]),
        ("0,", None, {}, [0]),
        ("2,1", "20GiB", {}, [2, 1]),
        ("auto", None, {"CUDA_VISIBLE_DEVICES": "0,2"}, [2, 0]),
        ("1", None, {"CUDA_VISIBLE_DEVICES": "0,2"}, [2]),
        ("auto", None, {"CUDA_VISIBLE_DEVICES": "2,9,1"}, [2]),
        ("0,2", None, {"CUDA_VISIBLE_DEVICES": UUIDS[2] + "," + UUIDS[0]}, [0, 2]),
    ],
)
def test_gpus_are_set_by_uuid(plan, gpus, min_free, environ, expected):
    settings = {
        "CUDA_VISIBLE_DEVICES": ",".join(UUIDS[index] for index in expected),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert plan(gpus, min_free=min_free, **environ) == Plan(environ=settings, num_gpus=len(expected))


@pytest.mark.parametrize("samples", [None, []])
def test_auto_without_a_driver_leaves_torch_what_it_finds(plan, samples):
    made = plan(samples=samples)
    assert made.environ == {}
    assert made.num_gpus == 0
    assert "No NVIDIA GPU" in made.note


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "No usable GPU in CUDA_VISIBLE_DEVICES='': the script runs on the CPU"),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, "No usable GPU in CUDA_VISIBLE_DEVICES='1,1'"),
    ],
)
def test_auto_falls_to_the_cpu_with_one_line(plan, environ, words):
    made = plan(**environ)
    assert made.environ == CPU
    assert made.num_gpus == 0
    assert words in made.note
    assert "\n" not in made.note


def test_indices_that_may_not_be_cudas_are_told_once(plan, caplog):
    plan("1", samples=[make_sample(0, name="NVIDIA T400"), *BOX[1:]], CUDA_VISIBLE_DEVICES="1,2")
    (record,) = caplog.records
    assert "is read in PCI order" in record.message


@pytest.mark.parametrize(
    ("gpus", "min_free", "environ", "words"),
    [
        ("4", None, {}, "Found 3 of 4 requested GPUs"),
        ("auto", "91GiB", {}, "Found 0 of 1 requested GPUs"),
        ("3", "20GiB", {}, "GPU 0 .* below 20.0 GiB"),
        ("0,7", None, {}, "Found 1 of 2 requested GPUs"),
        ("0,1", "20GiB", {}, "GPU 2 .* not asked for"),
        ("0,1", None, {"CUDA_VISIBLE_DEVICES": "1,2"}, "GPU 0 .* hidden by CUDA_VISIBLE_DEVICES='1,2'"),
        ("1", None, {"CUDA_VISIBLE_DEVICES": "-1"}, "GPU 2 .* hidden by CUDA_VISIBLE_DEVICES='-1'"),
    ],
)
def test_what_is_asked_for_and_cannot_be_had(plan, gpus, min_free, environ, words):
    with pytest.raises(DeviceError, match=words) as caught:
        plan(gpus, min_free=min_free, **environ)
    assert all(f"GPU {index}" in str(caught.value) for index in range(3))


@pytest.mark.parametrize(
    ("samples", "environ"),
    [([make_sample(0, is_mig=True)], {}), (BOX, {"CUDA_VISIBLE_DEVICES": "MIG-c6d4f1ef"})],
    ids=["all in MIG mode", "one instance named"],
)
def test_instances_are_left_to_cuda_and_never_asked_for(plan, samples, environ):
    assert plan(samples=samples, **environ) == Plan()
    with pytest.raises(DeviceError, match="Found 0 of 1"):
        plan("1", samples=samples, **environ)


def test_a_gpu_in_mig_mode_is_refused_beside_whole_ones(plan):
    box = [make_sample(0, is_mig=True), *BOX[1:]]
    assert plan(samples=box).num_gpus == 2
    with pytest.raises(DeviceError, match="GPU 0 .* in MIG mode: set CUDA_VISIBLE_DEVICES to an instance"):
        plan("3", samples=box)
