"""A script in the style of PyTorch's MNIST example: train and test functions, a scheduler, a saved state dict."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import everygpu


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.fc1 = nn.Linear(8 * 16, 16)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}] Loss: {loss.item():.9f}")


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    test_loss /= len(test_loader.dataset)
    print(f"Test set: Average loss: {test_loss:.9f}, Accuracy: {correct}/{len(test_loader.dataset)}")


def digits(num_rows):
    """Make images whose brightest third tells the class."""
    target = torch.arange(num_rows) % 3
    data = torch.randn(num_rows, 1, 12, 12)
    for i, t in enumerate(target.tolist()):
        data[i, :, 4 * t : 4 * t + 4] += 1
    return TensorDataset(data, target)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", nargs="*", help="one replica each; one device without a wrapper if left out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--log-interval", type=int, default=1)
    parser.add_argument("--save-model", metavar="FILE")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    device = torch.device(args.devices[0] if args.devices else "cpu")

    train_loader = DataLoader(digits(50), batch_size=16, shuffle=True)
    test_loader = DataLoader(digits(21), batch_size=10)
    model = Net().to(device)
    if args.devices:
        model = everygpu.DataParallel(model, args.devices)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    if args.save_model:
        torch.save(model.state_dict(), args.save_model)


if __name__ == "__main__":
    try:
        main()
    finally:
        torch.set_default_dtype(torch.float32)
