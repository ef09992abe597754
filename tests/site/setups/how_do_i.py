"""What a reader of docs/how-do-i.md has: a network in a wrapper, its optimizer, data, and a run of W&B."""

import types

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everygpu


class Sizes(nn.Module):
    def forward(self, images):
        return torch.stack([image.mean() for image in images])


model = everygpu.DataParallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
network = everygpu.DataParallel(Sizes())
images = [torch.rand(3, 4, height) for height in (4, 5, 6, 7)]
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randint(3, (8,))
loader = DataLoader(TensorDataset(x, y), batch_size=4)
mean = everygpu.Meter()
number, logged = 50, []
run = types.SimpleNamespace(log=lambda figures, step: logged.append((step, figures)))
