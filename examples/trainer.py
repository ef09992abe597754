"""A complete trainer to copy: checkpoints, resume, evaluation, the best model, early stopping and logging.

Replace ``make_data`` and ``make_model``. The same script runs on one GPU, on all GPUs, and under torchrun.

    python examples/trainer.py                       # all GPUs, or the CPU; the same line again resumes
    torchrun --nproc-per-node 2 examples/trainer.py  # two processes
"""

import argparse
import csv
import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import everygpu


def make_data():
    """Points on two spirals, and which spiral each is on: 2,000 to train on and 500 to test on."""
    random = torch.Generator().manual_seed(0)
    turns, spiral = torch.rand(2500, generator=random) * 6 + 1, torch.arange(2500) % 2
    angle = turns + spiral * torch.pi
    points = torch.stack([turns * angle.cos(), turns * angle.sin()], 1) / 7 + 0.1 * torch.randn(
        2500, 2, generator=random
    )
    return random_split(TensorDataset(points, spiral), [2000, 500], generator=random)


def make_model():
    return nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


class EarlyStopping:
    """Whether the loss has stopped improving; its state is saved with the rest."""

    def __init__(self, patience):
        self.patience, self.best, self.waited = patience, math.inf, 0

    def update(self, loss):
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(loss, self.best)

    def is_due(self):
        return self.waited >= self.patience

    def state_dict(self):
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state):
        self.best, self.waited = state["best"], state["waited"]


def evaluate(step, batches):
    """Return loss and accuracy over the whole test set, the same on every rank."""
    loss, accuracy = everygpu.Meter(), everygpu.Meter()
    for x, y in batches:
        result = step.evaluate(x, y)
        loss.update(result.loss, len(y))
        accuracy.update((result.output.argmax(1) == y).float().mean(), len(y))
    return loss.sync().avg, accuracy.sync().avg


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=100, help="rows on all GPUs of all processes together")
    parser.add_argument("--patience", type=int, default=5, help="stop after this many epochs without a better loss")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/trainer"))
    options = parser.parse_args()

    everygpu.seed_all(0)
    model = everygpu.DataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), optimizer, clip_norm=1.0)
    train_set, test_set = make_data()
    train = everygpu.Feeder(DataLoader(train_set, options.batch_size, shuffle=True), model, seed=0)
    test = everygpu.Feeder(DataLoader(test_set, options.batch_size), model)
    stopping = EarlyStopping(options.patience)

    with everygpu.CheckpointManager(
        options.folder, keep=2, best=("accuracy", "max", 1),
        model=model, optimizer=optimizer, scheduler=scheduler, train_step=step, data=train, stopping=stopping,
    ) as run:  # fmt: skip
        epoch = run.resume()  # 0 in an empty folder
        while epoch < options.epochs and not stopping.is_due():
            epoch, train_loss = epoch + 1, everygpu.Meter()
            for x, y in train:
                train_loss.update(step(x, y), len(x))
            scheduler.step()
            train_loss = train_loss.sync().avg  # every rank calls sync()
            test_loss, accuracy = evaluate(step, test)
            stopping.update(test_loss)  # all ranks see the same loss, so all stop
            run.save(epoch, accuracy=accuracy)
            if everygpu.is_main():  # one process prints and logs
                print(f"epoch {epoch:2}  loss {train_loss:.4f}  test loss {test_loss:.4f}  accuracy {accuracy:.4f}")
                with open(options.folder / "log.csv", "a", newline="") as file:
                    csv.writer(file).writerow([epoch, train_loss, test_loss, accuracy])
        best = make_model()
        everygpu.load(run.best(), model=best)  # the bare model, on any device
    if everygpu.is_main():
        torch.save(best.state_dict(), options.folder / "best.pt")


if __name__ == "__main__":
    main()
