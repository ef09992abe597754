"""Checks of limits and variables, at the limits."""

import pytest

from everygpu.devices import host_checks as checks
from tests.devices.fake_nvml import GIB, make_sample


@pytest.mark.parametrize(
    ("environ", "states"),
    [
        ({}, []),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, ["warning"]),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, []),
        ({"CUDA_LAUNCH_BLOCKING": ""}, []),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, ["warning"]),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"}, ["note", "note"]),
        ({"NCCL_DEBUG": "WARN"}, []),
        ({"EVERYGPU_P2P": "staged"}, ["note"]),
        ({"EVERYGPU_P2P": "trust"}, ["note"]),
        ({"EVERYGPU_P2P": "test"}, []),
    ],
)
def test_variables(environ, states):
    findings = checks.check_variables(environ)
    assert [finding.state for finding in findings] == states
    assert all(finding.fix for finding in findings)
    assert all(f"{name}={environ[name]}" in finding.message for name, finding in zip(environ, findings))


@pytest.mark.parametrize(
    ("names", "environ", "noted"),
    [
        (["A", "A"], {}, False),
        (["A", "B"], {}, True),
        (["A", "B"], {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, True),
        (["A", "B"], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
        ([], {}, False),
    ],
)
def test_order(names, environ, noted):
    findings = checks.check_order([make_sample(i, name=name) for i, name in enumerate(names)], environ)
    assert [finding.state for finding in findings] == ["note"] * noted


@pytest.mark.parametrize(("total", "states"), [(64 * 2**20, ["warning"]), (GIB, ["ok"]), (None, [])])
def test_shared_memory(total, states):
    findings = checks.check_shared_memory(total)
    assert [finding.state for finding in findings] == states
    assert all(("--shm-size" in (finding.fix or "")) == (finding.state == "warning") for finding in findings)


@pytest.mark.parametrize(("limit", "state"), [(1024, "warning"), (4095, "warning"), (4096, "ok"), (None, "ok")])
def test_open_files(limit, state):
    (finding,) = checks.check_open_files(limit)
    assert (finding.state, "ulimit -n" in (finding.fix or "")) == (state, state == "warning")


@pytest.mark.parametrize(("limit", "state"), [(8 * 2**20, "note"), (GIB, "ok"), (None, "ok")])
def test_locked_memory(limit, state):
    (finding,) = checks.check_locked_memory(limit)
    assert (finding.state, "ulimit -l" in (finding.fix or "")) == (state, state == "note")
