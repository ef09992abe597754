"""What a reader of README has: a script that trains on one device."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(8, 2)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(2, (32,))), batch_size=16, shuffle=True)
