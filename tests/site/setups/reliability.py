"""A model with its loss and optimizer."""

import torch

import everygpu

model = everygpu.DataParallel(torch.nn.Linear(4, 2))
loss = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
