"""Train an image classifier and watch it: loss, rows per second, time left, time spent waiting for data, each device.

Images are drawn while they are loaded, which takes time as augmenting photographs would. Copy this for a run that you
want to watch.

    python examples/images.py                           # all GPUs, or two replicas on the CPU
    python examples/images.py --replicas 3 --workers 2  # three replicas on the CPU, two processes that load data
"""

import argparse
import time

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import everygpu

console = Console(highlight=False)
SHAPES = ("disc", "square", "cross", "ring")
SIZE = 32


class Shapes(Dataset):
    """Images of shape (3, 32, 32): one of four shapes, anywhere, of any size and colour, under noise."""

    def __init__(self, num_images: int, first: int = 0) -> None:
        self.num_images, self.first = num_images, first

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(self.first + index)  # the same image in every epoch
        shape = (self.first + index) % len(SHAPES)
        x, y, radius = (
            torch.rand(3, generator=random) * torch.tensor([12, 12, 5]) + torch.tensor([10, 10, 5])
        ).tolist()
        pixels = torch.arange(SIZE)
        dx, dy = (pixels - x).abs().expand(SIZE, SIZE), (pixels - y).abs().expand(SIZE, SIZE).T
        far, near, distance = torch.maximum(dx, dy), torch.minimum(dx, dy), torch.hypot(dx, dy)
        square, disc = far < radius, distance < radius
        is_inside = (disc, square, square & (near < radius / 3), disc & (distance > radius / 2))[shape]
        colour = torch.rand(3, 1, 1, generator=random) + 0.5
        return is_inside * colour + 0.3 * torch.randn(3, SIZE, SIZE, generator=random), shape


def make_model() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU())

    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(block(3, 16), block(16, 32), block(32, 64), pooled, nn.Linear(64, len(SHAPES)))


def device_lines(devices: list[torch.device], rows: list[int]) -> Table:
    """Describe each device: its rows of the batch, and for a GPU also its utilization and free memory."""
    table = Table.grid(padding=(0, 2))
    gpus = {gpu.device: gpu for gpu in everygpu.devices.visible_devices()}
    for replica, (device, num_rows) in enumerate(zip(devices, rows)):
        gpu = gpus.get(device)
        busy = f"{gpu.utilization_pct or 0:.0f}% busy" if gpu else ""
        free = f"{(gpu.free_memory_bytes or 0) / 2**30:.1f} GiB free" if gpu else ""
        table.add_row(f"replica {replica} on {device}", f"{num_rows} rows", busy, free)
    return table


def train_epoch(step: everygpu.TrainStep, feeder: everygpu.Feeder, title: str, num_rows: int) -> None:
    mean_loss, begin, drawn = everygpu.Meter(), time.perf_counter(), 0.0
    progress = Progress(title, BarColumn(20), "{task.completed}/{task.total} rows", TimeRemainingColumn())
    task = progress.add_task("", total=num_rows)

    def figures() -> str:
        rate = mean_loss.num_rows / (time.perf_counter() - begin)
        return f"loss {mean_loss:.3f}  {rate:,.0f} rows/s  {feeder.report().wait_pct:.0f}% waiting for data"

    # Without a terminal, as in a cluster's log, it only prints a line per epoch.
    with Live(progress, console=console if console.is_terminal else Console(quiet=True), transient=True) as live:
        for images, labels in feeder:
            mean_loss.update(step(images, labels), len(images))
            progress.advance(task, len(images))
            if time.perf_counter() - drawn > 0.5:  # reading the loss waits for the GPUs
                drawn = time.perf_counter()
                rows = [len(shard) for shard in getattr(images, "shards", [images])]
                live.update(Group(progress, figures(), device_lines(feeder.devices, rows)))
    console.print(f"{title}  {figures()}", end="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="replicas on the CPU, instead of all GPUs")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=4096, help="how many to train on")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    options = parser.parse_args()

    everygpu.seed_all(0)
    on_gpus = torch.cuda.is_available() and options.replicas is None
    model = everygpu.DataParallel(make_model(), None if on_gpus else ["cpu"] * (options.replicas or 2))
    step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=3e-3))
    loading = {"batch_size": options.batch_size, "num_workers": options.workers, "pin_memory": on_gpus}
    train = everygpu.Feeder(DataLoader(Shapes(options.images), shuffle=True, **loading), model)
    test = everygpu.Feeder(DataLoader(Shapes(options.images // 8, first=10**6), **loading), model)

    for epoch in range(1, options.epochs + 1):
        train_epoch(step, train, f"epoch {epoch}", options.images)
        accuracy = everygpu.Meter()
        for images, labels in test:
            hits = step.evaluate(images, labels).output.argmax(1) == labels
            accuracy.update(hits.float().mean(), len(labels))
        console.print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
