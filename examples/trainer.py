"""A complete trainer to copy: checkpoints, resume, evaluation, the best model, early stopping and a log.

python examples/trainer.py                       # all GPUs, or the CPU; the same line again resumes
torchrun --nproc-per-node 2 examples/trainer.py  # two processes
"""

import argparse
import csv
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import everygpu


def make_data():
    """Noisy points and their class: replace them with your own training and test set."""
    points = torch.randn(2500, 2)
    data = TensorDataset(points + 0.1 * torch.randn(2500, 2), (points.prod(1) > 0).long())
    return random_split(data, [2000, 500])


def make_model():
    return nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def evaluate(step, batches):
    """Return loss and accuracy over the whole test set, the same on every rank."""
    loss, accuracy = everygpu.Meter(), everygpu.Meter()
    for x, y in batches:
        result = step.evaluate(x, y)
        loss.update(result.loss, len(y))
        accuracy.update((result.output.argmax(1) == y).float().mean(), len(y))
    return loss.sync().avg, accuracy.sync().avg


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better loss until the rate drops")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/trainer"))
    args = parser.parse_args()

    everygpu.seed_all(0)
    model = everygpu.DataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=args.patience)
    step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), optimizer, clip_norm=1.0)
    train_set, test_set = make_data()
    train = everygpu.Feeder(DataLoader(train_set, batch_size=100, shuffle=True), model)
    test = everygpu.Feeder(DataLoader(test_set, batch_size=100), model)
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train_step": step, "data": train}

    with everygpu.CheckpointManager(args.folder, best=("accuracy", "max", 1), **saved) as run:
        epoch = run.resume()  # 0 in an empty folder
        while epoch < args.epochs and scheduler.get_last_lr()[0] > 1e-5:  # early stopping: after the third drop
            epoch, mean = epoch + 1, everygpu.Meter()
            for x, y in train:
                mean.update(step(x, y), len(x))
            loss = mean.sync().avg  # every rank calls sync()
            test_loss, accuracy = evaluate(step, test)
            scheduler.step(test_loss)  # all ranks see the same loss, so all stop
            run.save(epoch, accuracy=accuracy)
            if everygpu.is_main():  # one process prints and logs
                print(f"epoch {epoch:2}  loss {loss:.4f}  test loss {test_loss:.4f}  accuracy {accuracy:.4f}")
                with open(args.folder / "log.csv", "a", newline="") as file:
                    csv.writer(file).writerow([epoch, loss, test_loss, accuracy])
    if everygpu.is_main():
        best = make_model()
        everygpu.load(run.best(), model=best)  # the bare model, on any device
        torch.save(best.state_dict(), args.folder / "best.pt")


if __name__ == "__main__":
    main()
