"""What a reader of docs/how-do-i.md has: models in wrappers, an optimizer, a step, data, files, and a run of W&B."""

import types

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everygpu


class Sizes(nn.Module):
    def forward(self, images):
        return torch.stack([image.mean() for image in images])


class WithLoss(nn.Module):
    """Returns logits and loss as nanoGPT does, or the loss alone."""

    def __init__(self, returns_both):
        super().__init__()
        self.head, self.returns_both = nn.Linear(4, 3), returns_both

    def forward(self, x, y):
        logits = self.head(x)
        loss = criterion(logits, y)
        return (logits, loss) if self.returns_both else loss


torch.manual_seed(0)
model = everygpu.DataParallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
network = everygpu.DataParallel(Sizes())
gpt, network_with_loss = everygpu.DataParallel(WithLoss(True)), everygpu.DataParallel(WithLoss(False))
images = [torch.rand(3, 4, height) for height in (4, 5, 6, 7)]
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = everygpu.TrainStep(model, criterion, optimizer)
x, y = torch.randn(8, 4), torch.randint(3, (8,))
loader = test_loader = DataLoader(TensorDataset(x, y), batch_size=4)
number, logged = 50, []
run = types.SimpleNamespace(log=lambda figures, step: logged.append((step, figures)))
if everygpu.is_main():
    torch.save(model.state_dict(), "resnet50.pth")
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, "old.pt")
