"""A script in the style of PyTorch's ImageNet example: meters, top-k accuracy, a schedule by hand, resuming."""

import argparse
import os
import shutil

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everygpu


class AlexNet(nn.Module):
    def __init__(self, num_classes=6):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(4))
        self.classifier = nn.Linear(8 * 16, num_classes)

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


class AverageMeter:
    """Compute and store the average and the current value."""

    def __init__(self, name):
        self.name = name
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return f"{self.name} {self.val:.9f} ({self.avg:.9f})"


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def train(loader, model, criterion, optimizer, epoch, device):
    losses, top1, top5 = AverageMeter("Loss"), AverageMeter("Acc@1"), AverageMeter("Acc@5")
    model.train()
    for i, (images, target) in enumerate(loader):
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0].item(), images.size(0))
        top5.update(acc5[0].item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"Epoch [{epoch}][{i}] {losses} {top1} {top5}")


def validate(loader, model, criterion, device):
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            images, target = images.to(device), target.to(device)
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target)[0][0].item(), images.size(0))
    print(f" * {losses} {top1}")
    return top1.avg


def adjust_learning_rate(optimizer, epoch, args):
    lr = args.lr * (0.1 ** (epoch // 2))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def save_checkpoint(state, is_best, folder):
    torch.save(state, f"{folder}/checkpoint.pth.tar")
    if is_best:
        shutil.copyfile(f"{folder}/checkpoint.pth.tar", f"{folder}/model_best.pth.tar")


def wrap(model, args):
    """Wrap the convolutions only, as the example does for AlexNet and VGG, or the whole model."""
    if not args.devices:
        return model
    if args.features_only:
        model.features = everygpu.DataParallel(model.features, args.devices)
        return model
    return everygpu.DataParallel(model, args.devices)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", nargs="*", help="one replica each; one device without a wrapper if left out")
    parser.add_argument("--features-only", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--resume", metavar="FILE", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    device = torch.device(args.devices[0] if args.devices else "cpu")

    model = wrap(AlexNet().to(device), args)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    start_epoch, best_acc1 = 0, 0.0
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume, map_location=device)
        start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    images = torch.randn(42, 3, 16, 16)
    dataset = TensorDataset(images, images.mean((2, 3)).argmax(1) + 3 * (images[:, 0, 0, 0] > 0))
    train_loader, val_loader = DataLoader(dataset, batch_size=16), DataLoader(dataset, batch_size=10)
    for epoch in range(start_epoch, args.epochs):
        adjust_learning_rate(optimizer, epoch, args)
        train(train_loader, model, criterion, optimizer, epoch, device)
        acc1 = validate(val_loader, model, criterion, device)
        is_best, best_acc1 = acc1 > best_acc1, max(acc1, best_acc1)
        core = model.module if isinstance(model, nn.DataParallel) else model
        print("learning", type(core).__name__)
        state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best_acc1}
        save_checkpoint({**state, "optimizer": optimizer.state_dict()}, is_best, args.out)


if __name__ == "__main__":
    try:
        main()
    finally:
        torch.set_default_dtype(torch.float32)
