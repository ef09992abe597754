"""What a reader of docs/several-machines.md has."""

import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 3)
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(4, 4), torch.randint(3, (4,))), batch_size=4)
