"""The data-parallelism tutorial of the PyTorch documentation, on any number of replicas.

Random rows go through one linear layer. The model prints the sizes it sees: each replica sees a share of the
rows, while the loop outside sees the whole batch. See
https://pytorch.org/tutorials/beginner/blitz/data_parallel_tutorial.html

    python examples/tutorial.py --replicas 3   # three replicas on the CPU
    python examples/tutorial.py                # all GPUs
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import everygpu

NUM_ROWS, BATCH_SIZE = 100, 30
INPUT_SIZE, OUTPUT_SIZE = 5, 2


class Model(nn.Module):
    """Rows of shape (rows, 5) in, rows of shape (rows, 2) out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(INPUT_SIZE, OUTPUT_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        output = self.fc(x)
        # One call, so that lines of replicas that run at the same time don't mix.
        print(f"\tIn model: input size {tuple(x.shape)} output size {tuple(output.shape)}\n", end="")
        return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="replicas on the CPU, instead of all GPUs")
    options = parser.parse_args()

    batches = DataLoader(torch.randn(NUM_ROWS, INPUT_SIZE), BATCH_SIZE, shuffle=True)
    device_ids = None if options.replicas is None else ["cpu"] * options.replicas
    model = everygpu.DataParallel(Model(), device_ids)

    for batch in batches:
        output = model(batch)
        print(f"Outside: input size {tuple(batch.shape)} output size {tuple(output.shape)}")


if __name__ == "__main__":
    main()
