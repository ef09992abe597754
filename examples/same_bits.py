"""Train on 1, 2 and 4 devices with four replicas, and compare the models bit for bit.

python examples/same_bits.py             # CPU devices
python examples/same_bits.py --steps 50
"""

import argparse
import hashlib
import sys

import torch
from torch import nn

import everygpu


def train(num_devices: int, num_steps: int) -> str:
    """Train a small model on random points; return the SHA-256 of its losses and parameters."""
    everygpu.seed_all(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    model = everygpu.DataParallel(module, ["cpu"] * num_devices, num_replicas=4)
    step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.AdamW(module.parameters(), lr=1e-2))
    found = hashlib.sha256()
    for _ in range(num_steps):
        x = torch.randn(32, 8)
        loss = step(x, (x.sum(1) > 0).long())
        found.update(loss.numpy().tobytes())
    for value in module.state_dict().values():
        found.update(value.numpy().tobytes())
    model.release()
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    num_steps = parser.parse_args().steps
    hashes = {}
    for num_devices in (1, 2, 4):
        hashes[num_devices] = train(num_devices, num_steps)
        print(f"{num_devices} devices  {hashes[num_devices]}")
    if len(set(hashes.values())) > 1:
        sys.exit("The results differ.")
    print("The same bits.")


if __name__ == "__main__":
    main()
