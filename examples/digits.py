"""Train a small CNN on scikit-learn's handwritten digits, on all devices.

This is an ordinary PyTorch script. Only the lines with ``everygpu.`` are new.

    python examples/digits.py                # all GPUs, or two replicas on the CPU
    python examples/digits.py --replicas 3   # three replicas on the CPU
    python examples/digits.py --resume       # continue where the last run stopped
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from sklearn.datasets import load_digits  # if it is missing: pip install '.[demo]' in the checkout, or scikit-learn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import everygpu

console = Console()


class DigitNet(nn.Module):
    """Images of shape (rows, 1, 8, 8) in, scores of shape (rows, 10) out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 2 * 2, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Split 1,797 images of 8x8 pixels into 1,437 to train and 360 to test, always the same ones."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@contextmanager
def show_progress(title: str, total: int) -> Iterator:
    """Show a bar with loss and rows per second; yields a function to call after each batch."""
    text = "{task.description} {task.completed}/{task.total} rows  {task.fields[info]}"
    hidden = not console.is_terminal
    with Progress(BarColumn(), TextColumn(text), console=console, transient=True, disable=hidden) as progress:
        task, start = progress.add_task(title, total=total, info=""), time.perf_counter()

        def advance(rows: int, loss: everygpu.Meter) -> None:
            done = progress.tasks[0].completed + rows
            rate = done / (time.perf_counter() - start)
            progress.update(task, completed=done, info=f"loss {loss:.4f}  {rate:,.0f} rows/s")

        yield advance


def train_epoch(model: nn.Module, batches: everygpu.Feeder, optimizer: torch.optim.Optimizer, title: str) -> float:
    model.train()
    mean_loss = everygpu.Meter()
    with show_progress(title, len(batches.loader.dataset)) as advance:
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean_loss.update(loss, len(images))
            advance(len(images), mean_loss)
    return mean_loss.sync().avg


@torch.no_grad()
def measure_accuracy(model: nn.Module, batches: DataLoader) -> float:
    model.eval()
    accuracy = everygpu.Meter()
    for images, labels in batches:
        hits = model(images).argmax(1).cpu() == labels
        accuracy.update(hits.float().mean(), len(labels))
    return accuracy.avg


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="replicas on the CPU, instead of all GPUs")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/digits"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    console.quiet = not everygpu.is_main()  # under torchrun one process prints
    everygpu.seed_all(options.seed)
    on_gpus = torch.cuda.is_available() and options.replicas is None
    device_ids = None if on_gpus else ["cpu"] * (options.replicas or 2)

    model = everygpu.DataParallel(DigitNet(), device_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)

    train_set, test_set = load_data()
    train_batches = everygpu.Feeder(DataLoader(train_set, options.batch_size, shuffle=True), model, seed=options.seed)
    test_batches = DataLoader(test_set, 360)
    console.print(f"training on {', '.join(map(str, model.replica_devices))}", highlight=False)

    checkpoints = everygpu.CheckpointManager(
        options.checkpoint, keep=1, best=("accuracy", "max", 1), overwrite=not options.resume,
        model=model, optimizer=optimizer, scheduler=scheduler, data=train_batches,
    )  # fmt: skip
    if options.resume:
        checkpoints.resume()

    for epoch in range(train_batches.epoch + 1, options.epochs + 1):
        loss = train_epoch(model, train_batches, optimizer, f"epoch {epoch}")
        scheduler.step()
        accuracy = measure_accuracy(model, test_batches)
        console.print(f"epoch {epoch:2}  loss {loss:.6f}  accuracy {accuracy:.4f}", highlight=False)
        checkpoints.save(epoch, accuracy=accuracy)

    # A checkpoint doesn't depend on devices or replicas: it loads into the bare model, here on the CPU.
    bare = DigitNet()
    everygpu.load(options.checkpoint, model=bare)
    console.print(f"test accuracy {measure_accuracy(bare, test_batches):.4f}", highlight=False)


if __name__ == "__main__":
    main()
