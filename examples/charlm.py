"""Train a small GPT on the text of Python's own help, letter by letter, and let it write.

One call makes a whole step: forward, loss, backward, clipped gradients, and AdamW with its state sharded over the
devices.

    python examples/charlm.py                            # all GPUs with 124M parameters, or two replicas on the CPU
    python examples/charlm.py --replicas 3 --steps 100   # three replicas on the CPU, for a shorter time
"""

import argparse
import time
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import everygpu

console = Console(highlight=False)


class Size(NamedTuple):
    width: int
    heads: int
    layers: int
    context: int  # letters that the model looks back at
    rows: int  # rows of a batch per device
    learning_rate: float


SMALL = Size(width=128, heads=4, layers=2, context=64, rows=8, learning_rate=4e-3)
GPT2 = Size(width=768, heads=12, layers=12, context=1024, rows=16, learning_rate=6e-4)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Letters of shape (rows, length) in, scores of shape (rows, length, letters) out."""

    def __init__(self, num_letters: int, size: Size) -> None:
        super().__init__()
        self.letters = nn.Embedding(num_letters, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, num_letters, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, letters: Tensor) -> Tensor:
        positions = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.norm(self.blocks(self.letters(letters) + self.positions(positions))))


def load_text() -> tuple[str, Tensor]:
    """Return the letters that occur, and the text as their numbers."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    letters = "".join(sorted(set(text)))
    number = {letter: i for i, letter in enumerate(letters)}
    return letters, torch.tensor([number[letter] for letter in text])


def draw_batch(text: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Cut pieces out of the text; the target of each letter is the next one."""
    starts = torch.randint(len(text) - length, (rows,))
    pieces = torch.stack([text[start : start + length + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model: GPT, letters: str, begin: str, length: int, context: int, device: torch.device) -> str:
    """Continue a text, drawing each letter by its probability."""
    model.eval()
    numbers = torch.tensor([[letters.index(letter) for letter in begin]], device=device)
    for _ in range(length):
        scores = model(numbers[:, -context:])[:, -1] / 0.8
        numbers = torch.cat([numbers, torch.multinomial(scores.softmax(-1), 1)], 1)
    return "".join(letters[i] for i in numbers[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="replicas on the CPU, instead of all GPUs")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    everygpu.seed_all(0)
    on_gpus = torch.cuda.is_available() and options.replicas is None
    size = GPT2 if on_gpus else SMALL
    letters, text = load_text()
    train_text, test_text = text[: -len(text) // 10], text[-len(text) // 10 :]
    model = everygpu.DataParallel(GPT(len(letters), size), None if on_gpus else ["cpu"] * (options.replicas or 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, weight_decay=0.1)
    warmed_up = {"pct_start": 0.05, "cycle_momentum": False}
    scheduler = OneCycleLR(optimizer, size.learning_rate, total_steps=options.steps + 1, **warmed_up)
    step = everygpu.TrainStep(model, loss_of, optimizer, precision="bf16" if on_gpus else "fp32", clip_norm=1.0)

    num_parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{num_parameters / 1e6:.1f}M parameters on {', '.join(map(str, model.replica_devices))}")
    rows = size.rows * len(model.device_ids)
    mean_loss, begin = everygpu.Meter(), time.perf_counter()
    for i in range(1, options.steps + 1):
        mean_loss.update(step(*draw_batch(train_text, rows, size.context)))
        scheduler.step()
        if i % max(1, options.steps // 10) == 0:
            rate = i * rows * size.context / (time.perf_counter() - begin)
            console.print(f"step {i:4}  loss {mean_loss:.3f}  {rate:,.0f} letters/s")
            mean_loss.reset()

    losses = [step.evaluate(*draw_batch(test_text, rows, size.context)).loss for _ in range(8)]
    console.print(f"test loss {torch.stack(losses).mean():.3f}")
    sample = write(model.module, letters, "The ", 400, size.context, model.src_device_obj)
    console.print(sample, markup=False)


if __name__ == "__main__":
    main()
