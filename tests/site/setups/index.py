"""What a reader's own script has, which the page's diff changes."""

import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 2)
criterion = torch.nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(2, (32,))), batch_size=16)
