"""Stop a run with Ctrl-C, start it again with the same command, and get the losses of a run that was never stopped.

Every 20 steps it saves all that a step depends on: model, optimizer, scheduler, the position in the data, and the
random generators for shuffling and dropout. Steps after the last save are repeated, with the same result.

    python examples/resume.py               # press Ctrl-C at any time, then the same line again
    python examples/resume.py --replicas 3  # three replicas on the CPU
"""

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import everygpu

console = Console(highlight=False)


def load_data(rows: int = 2000) -> TensorDataset:
    """Return points on two spirals, and the spiral of each."""
    random = torch.Generator().manual_seed(0)
    turns, spiral = torch.rand(rows, generator=random) * 8 + 1, torch.arange(rows) % 2
    angle = turns + spiral * torch.pi
    points = torch.stack([turns * angle.cos(), turns * angle.sin()], 1) / 8
    return TensorDataset(points + 0.02 * torch.randn(rows, 2, generator=random), spiral)


def make_model() -> nn.Module:
    layers = [nn.Linear(2, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)]
    return nn.Sequential(*layers)


def train(step: everygpu.TrainStep, run: everygpu.CheckpointManager, state: dict, last: int, pause: float) -> None:
    """Continue after the newest checkpoint, up to the last step."""
    done = run.resume()
    if done:
        console.print(f"going on after step {done}")
    while done < last:
        for points, spirals in state["data"]:  # the first epoch continues where it stopped
            loss, done = step(points, spirals), done + 1
            state["scheduler"].step()
            run.save(done)  # writes every 20th step
            if done % 5 == 0:
                console.print(f"step {done:3}  loss {loss.item():.6f}")
            time.sleep(pause)
            if done == last:
                break


def measure_accuracy(step: everygpu.TrainStep, points: Tensor, spirals: Tensor) -> float:
    hits = step.evaluate(points, spirals).output.argmax(1).cpu() == spirals
    return hits.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="replicas on the CPU, instead of all GPUs")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between steps, to have time for Ctrl-C")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/resume"))
    options = parser.parse_args()

    everygpu.seed_all(0)
    device_ids = None if torch.cuda.is_available() and options.replicas is None else ["cpu"] * (options.replicas or 2)
    dataset = load_data()
    model = everygpu.DataParallel(make_model(), device_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    data = everygpu.Feeder(DataLoader(dataset, options.batch_size, shuffle=True), model)
    step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data, "train_step": step}

    console.print("Ctrl-C stops; the same command goes on where the last checkpoint is")
    try:
        with everygpu.CheckpointManager(options.folder, keep=2, every=20, **state) as run:
            train(step, run, state, options.steps, options.pause)
    except KeyboardInterrupt:
        console.print("stopped: start it again to go on")
        raise SystemExit(130) from None
    accuracy = measure_accuracy(step, *dataset.tensors)
    console.print(f"all {options.steps} steps are done, accuracy {accuracy:.3f}; delete {options.folder} to begin anew")


if __name__ == "__main__":
    main()
