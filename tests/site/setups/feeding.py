"""What a reader of docs/feeding.md has. Nothing starts workers or measures for seconds: tests/feed does."""

import types

import torch
from torch.utils.data import DataLoader as Loader
from torch.utils.data import TensorDataset

import everygpu as package

everygpu = types.SimpleNamespace(**{name: getattr(package, name) for name in package.__all__})
everygpu.tune_workers = lambda *args: package.tune_workers(*args, candidates=[0], seconds=0.01)
everygpu.find_batch_size = lambda *args: types.SimpleNamespace(num_rows=2**11)  # which needs a GPU


def DataLoader(dataset, **options):
    return Loader(dataset, **options | {"num_workers": 0, "pin_memory": False})


dataset = TensorDataset(torch.randn(2048, 4), torch.randint(3, (2048,)))
test_loader = DataLoader(dataset, batch_size=1024)
model = torch.nn.Linear(4, 3)
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters())
num_epochs, num_steps = 1, 0
