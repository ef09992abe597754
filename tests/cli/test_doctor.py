"""``everygpu doctor``: lines, JSON, exit code."""

import json

import pytest
from click.testing import CliRunner

from everygpu.cli import main
from everygpu.devices.doctor import Diagnosis, Finding
from everygpu.devices.p2p import PairReport

OK = Finding(check="driver", state="ok", message="NVIDIA driver [580]")
WARNING = Finding(check="P2P", state="warning", message="copies hang between 0>1", fix="Turn off IOMMU.")
ERROR = Finding(check="torch", state="error", message="no CUDA", fix="Install it.")
PEERS = {(0, 1): PairReport(verdict="hangs", detail="x"), (1, 0): PairReport(verdict="right")}


@pytest.fixture
def run(monkeypatch):
    """Run the command on a machine with certain findings; ``run.asked`` has how it was examined."""

    def invoke(findings, *arguments, peers=None):
        def diagnose(environ, *, test_peers):
            invoke.asked = test_peers
            return Diagnosis(findings=tuple(findings), peers=peers)

        monkeypatch.setattr("everygpu.devices.doctor.diagnose", diagnose)
        return CliRunner().invoke(main, ["doctor", *arguments])

    return invoke


@pytest.mark.parametrize(("findings", "code"), [([OK], 0), ([OK, WARNING], 0), ([OK, WARNING, ERROR], 3), ([], 0)])
def test_exit_code(run, findings, code):
    assert run(findings).exit_code == code
    assert run(findings, "--json").exit_code == code


def test_each_finding_is_a_line_with_its_fix_below(run):
    assert run([OK, WARNING, ERROR]).stdout.splitlines() == [
        "ok      driver: NVIDIA driver [580]",
        "WARNING P2P: copies hang between 0>1",
        "        Turn off IOMMU.",
        "ERROR   torch: no CUDA",
        "        Install it.",
    ]


def test_json(run):
    report = json.loads(run([OK, ERROR], "--json", peers=PEERS).stdout)
    assert report["usable"] is False
    assert report["findings"][1] == {"check": "torch", "state": "error", "message": "no CUDA", "fix": "Install it."}
    pair = {"source": 0, "target": 1, "verdict": "hangs", "detail": "x"}
    assert report["pairs"][0] == pair
    assert json.loads(run([OK], "--json").stdout)["pairs"] == []


@pytest.mark.parametrize(("arguments", "asked"), [([], True), (["--quick"], False)])
def test_quick_copies_nothing(run, arguments, asked):
    run([OK], *arguments)
    assert run.asked is asked
