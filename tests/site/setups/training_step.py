"""What a reader of docs/training-step.md has."""

import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 3)
loader = DataLoader(TensorDataset(torch.randn(10, 4), torch.randint(3, (10,))), batch_size=2)
