"""What a reader of data-parallel.md has: a network for images of any size that can generate, and data."""

import torch
from torch import nn
from torch.utils.data import DataLoader


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, images, mask=None):
        means = torch.stack([image.mean((-2, -1)) for image in images])
        return self.head(self.norm(means if mask is None else means * mask))

    def generate(self, tokens):
        return torch.cat([tokens, tokens], 1)


images = [torch.rand(3, 4, height) for height in (4, 5, 6, 7)]
mask = torch.ones(3)
batch, target = torch.rand(8, 3, 4, 4), torch.randint(2, (8,))
tokens = torch.zeros(3, 2, dtype=torch.long)
model = module = Network()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(list(zip(batch, target)), batch_size=4)
