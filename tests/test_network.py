"""Without torchrun nothing here speaks with another machine, nor listens: SECURITY.md says so."""

import subprocess
import sys

import pytest

USE_ALL = """
import os, sys
calls = []
sys.addaudithook(lambda name, args: calls.append(name) if name.startswith("socket.") else None)

def sockets():  # those of C++, too
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return {os.readlink(link) for link in links if os.path.islink(link) and "socket" in os.readlink(link)}

before = sockets()
import torch, everygpu
watching = everygpu.watchdog(timeout=60)
net = torch.nn.Linear(4, 2)
model = everygpu.DataParallel(net, ["cpu"] * 2)
model(torch.ones(4, 4)).sum().backward()
optimizer = torch.optim.AdamW(net.parameters())
step = everygpu.TrainStep(model, torch.nn.functional.mse_loss, optimizer)
loader = torch.utils.data.DataLoader(list(zip(torch.ones(4, 4), torch.ones(4, 2))), batch_size=2)
for x, y in everygpu.Feeder(loader, model):
    step(x, y)
everygpu.save(sys.argv[1], model=model, optimizer=optimizer)
everygpu.load(sys.argv[1], model=model, optimizer=optimizer)
everygpu.devices.visible_devices()
watching.close()
print(calls, sockets() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.usefixtures("warm_python")
def test_nothing_connects_listens_or_asks_for_names(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", USE_ALL, str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "[] set()"
