"""Links between GPUs: found out in a real process, and every transfer goes round the broken ones."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from everygpu import comm
from everygpu.comm import staged
from everygpu.devices import p2p
from tests.devices.fake_nvml import FakeNvml, two_h200s

PAIR = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture
def lying(monkeypatch, tmp_path):
    """A machine with two GPUs whose driver says that they reach each other; gives a way to say how they lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(p2p.VARIABLE, raising=False)
    monkeypatch.setattr(p2p, "MODULE", "tests.devices.lying_gpus")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"gpu-{i}"))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*two_h200s()))
    p2p._broken_pairs.cache_clear()
    yield lambda fault: monkeypatch.setenv("LYING_GPUS", fault)
    p2p._broken_pairs.cache_clear()


def transfers_through_host(monkeypatch):
    """Make one of each transfer between the two GPUs; give the backend's functions that were called."""
    called = []
    for name in ("copy", "fill", "broadcast", "reduce"):
        monkeypatch.setattr(staged, name, lambda *args, name=name: called.append(name))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)  # there is no second GPU to put it on
    first, second = (SimpleNamespace(device=device) for device in PAIR)
    comm.copy(first, PAIR[1])
    comm.fill(first, second)
    comm.broadcast(first, [second])
    comm.reduce([first, second], PAIR[0])
    return called


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("hang", "never arrive"),
        ("nan", "arrive wrong (4104 bytes by a kernel), as between 1 more pair(s)"),
    ],
)
def test_copies_that_fail_are_found_and_gone_round(lying, monkeypatch, caplog, fault, said):
    lying(fault)
    assert not p2p.trusted_peers(PAIR)
    (record,) = caplog.records
    assert said in record.message
    p2p._broken_pairs.cache_clear()  # as the next process has it, for which the verdict is kept
    monkeypatch.setattr(p2p, "examine", lambda *args: pytest.fail("tested again"))
    assert not p2p.trusted_peers(PAIR)
    assert transfers_through_host(monkeypatch) == ["copy", "fill", "broadcast", "reduce"]


@pytest.mark.usefixtures("warm_python")
def test_sound_copies_are_trusted(lying, caplog):
    lying("")
    assert p2p.trusted_peers(PAIR)
    assert caplog.text == ""
