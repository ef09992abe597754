"""A model with its optimizer and data, as a script has them."""

import torch
from torch.utils.data import DataLoader

import everygpu

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = everygpu.Feeder(DataLoader(range(8), batch_size=4), "cpu", prefetch=0)
step, speed, uuids = 100, 19.4, ("cpu",)
