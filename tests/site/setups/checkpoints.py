"""A model, its optimizer, a data loader, and files of other programs with the model's state in them."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import everygpu

model = torch.nn.Linear(4, 2)
generator, discriminator, averaged = (torch.nn.Linear(4, 2) for _ in range(3))
optimizer = torch.optim.AdamW(model.parameters())
meter = everygpu.Meter()
dataset = TensorDataset(torch.randn(8, 4), torch.randint(2, (8,)))
data = everygpu.Feeder(DataLoader(dataset, batch_size=4, shuffle=True), "cpu", prefetch=0)


def train(x, y):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


train(*next(iter(data)))
weights = model.state_dict()
torch.save(weights, "resnet50.pth")
Path("llama").mkdir()
save_file(weights, "llama/model.safetensors")
torch.save({"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}, "last.ckpt")
torch.save({"model": weights, "epoch": 3}, "old.pt")
torch.save({"G": weights, "D": weights}, "gan.pt")
torch.save({"state_dict": weights, "state_dict_ema": weights}, "timm.pth.tar")

meter = everygpu.Meter()
meter.update(torch.tensor(0.5), 4)
