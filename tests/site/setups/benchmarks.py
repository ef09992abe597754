"""What a training script has: a class of models, and a loader."""

import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(2, (8,))), batch_size=4)


class MyModel(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 2))
