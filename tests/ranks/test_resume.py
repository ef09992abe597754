"""A run that is ended and goes on, each time with another number of ranks."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import everygpu
from tests.ranks.harness import run_ranks

NUM_ROWS, BATCH, NUM_EPOCHS = 23, 5, 3


class Rows(Dataset):
    """Rows that know their number."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(NUM_ROWS, 4, generator=generator)
        self.y = torch.randint(0, 3, (NUM_ROWS,), generator=generator)

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


def train(folder, num_steps):
    """Go on from the newest checkpoint for so many steps; return the rows and the loss of each."""
    everygpu.seed_all(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model = everygpu.DataParallel(net, ["cpu"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), optimizer)
    data = everygpu.Feeder(DataLoader(Rows(), batch_size=BATCH, shuffle=True), "cpu", prefetch=0)
    states = {"model": model, "optimizer": optimizer, "data": data, "train_step": step}
    found = []
    with everygpu.CheckpointManager(folder, keep=2, **states) as checkpoints:
        done = checkpoints.resume()
        while True:
            for x, y, rows in data:
                loss = step(x, y)
                done += 1
                found.append((rows.tolist(), loss.item()))
                checkpoints.save(done)
                if len(found) == num_steps:
                    return found


@pytest.mark.usefixtures("warm_python")
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    num_steps = NUM_EPOCHS * 5
    whole = train(str(tmp_path / "whole"), num_steps)
    parts = [[], []]
    for size, steps in ((1, 4), (3, 5), (2, num_steps - 9)):
        call = train, str(tmp_path / "parts"), steps
        results = [train(*call[1:])] if size == 1 else run_ranks(*call, size=size, folder=tmp_path / f"part{size}")
        for of_ranks in zip(*results):
            parts[0].append([row for rows, _ in of_ranks for row in rows])
            assert len({loss for _, loss in of_ranks}) == 1, "every rank has the loss of the whole batch"
            parts[1].append(of_ranks[0][1])
    assert parts[0] == [rows for rows, _ in whole]
    assert parts[1] == pytest.approx([loss for _, loss in whole], rel=1e-4)
    for epoch in range(NUM_EPOCHS):
        assert sorted(row for rows in parts[0][5 * epoch : 5 * epoch + 5] for row in rows) == list(range(NUM_ROWS))
