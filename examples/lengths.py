"""Train on texts of many lengths: which chapter of Python's help is a sentence from?

A batch is as long as its longest sentence; the rest is padding, which costs time and teaches nothing. So this script
puts sentences of similar lengths into a batch, and rounds lengths up: on GPUs `TrainStep` captures a step for each
batch shape that comes again (up to 128), and a few shapes are soon captured. Copy this for text, audio or molecules.

    python examples/lengths.py                 # all GPUs, or two replicas on the CPU
    python examples/lengths.py --random-order  # batches as they come, to see what the padding costs
"""

import argparse
import re
import time
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

import everygpu

console = Console(highlight=False)
PADDING, ROUND_TO, NUM_CHAPTERS = 0, 8, 8
Sentence = tuple[Tensor, int]


class SimilarLengths(Sampler[list[int]]):
    """Batches of sentences of similar lengths: sorted within pools of 20 batches, in another order each epoch."""

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        self.lengths, self.batch_size = torch.tensor(lengths), batch_size

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        pools = torch.randperm(len(self.lengths)).split(20 * self.batch_size)
        batches = [batch for pool in pools for batch in pool[self.lengths[pool].argsort()].split(self.batch_size)]
        return iter([batches[i].tolist() for i in torch.randperm(len(batches))])


class Classifier(nn.Module):
    """Words of shape (rows, length) in, scores of shape (rows, chapters) out; padding changes nothing."""

    def __init__(self, num_words: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_words, width, padding_idx=PADDING)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.weigh, self.head = nn.Linear(width, 1), nn.Linear(width, NUM_CHAPTERS)

    def forward(self, words: Tensor) -> Tensor:
        is_padding = words == PADDING
        x = self.embed(words)
        x = x + self.attend(x, x, x, key_padding_mask=is_padding, need_weights=False)[0]
        weights = self.weigh(x).squeeze(-1).masked_fill(is_padding, -torch.inf).softmax(1)
        return self.head((weights.unsqueeze(1) @ x).squeeze(1))


def pad(sentences: list[Sentence]) -> Sentence:
    """Make a batch: words of shape (rows, length) with padding at the end, and chapters of shape (rows,)."""
    length = -(-max(len(words) for words, _ in sentences) // ROUND_TO) * ROUND_TO
    padded = torch.stack([nn.functional.pad(words, (0, length - len(words)), value=PADDING) for words, _ in sentences])
    return padded, torch.tensor([chapter for _, chapter in sentences])


def load_sentences() -> tuple[list[Sentence], int]:
    """Return the sentences of the longest chapters as numbers of words, shuffled, and how many numbers there are."""
    names = sorted(topics, key=lambda name: (-len(topics[name]), name))[:NUM_CHAPTERS]
    split = [
        (re.findall("[a-z]+", s.lower()), i) for i, name in enumerate(names) for s in re.split(r"[.:]\s", topics[name])
    ]
    numbers: dict[str, int] = {}
    found = [(torch.tensor([numbers.setdefault(w, len(numbers) + 1) for w in ws]), i) for ws, i in split if len(ws) > 2]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[i] for i in order], len(numbers) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="replicas on the CPU, instead of all GPUs")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--random-order", action="store_true", help="batches of any lengths")
    options = parser.parse_args()

    everygpu.seed_all(0)
    device_ids = None if torch.cuda.is_available() and options.replicas is None else ["cpu"] * (options.replicas or 2)
    sentences, num_words = load_sentences()
    train, test = sentences[: -len(sentences) // 10], sentences[-len(sentences) // 10 :]
    model = everygpu.DataParallel(Classifier(num_words), device_ids)
    step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=3e-3))
    lengths = [len(words) for words, _ in train]
    console.print(f"{len(train)} sentences of {min(lengths)} to {max(lengths)} words, {len(model.device_ids)} replicas")
    if options.random_order:
        loader = DataLoader(train, options.batch_size, shuffle=True, collate_fn=pad)
    else:
        sampler = SimilarLengths(lengths, options.batch_size)
        loader = DataLoader(train, batch_sampler=sampler, collate_fn=pad)

    shapes = set()
    for epoch in range(1, options.epochs + 1):
        mean_loss, begin, num_all = everygpu.Meter(), time.perf_counter(), 0
        for words, chapters in everygpu.Feeder(loader, model):
            mean_loss.update(step(words, chapters), len(chapters))
            shapes.add(tuple(words.shape))
            num_all += words.numel()
        took = f"{sum(lengths) / (time.perf_counter() - begin):,.0f} words/s"
        console.print(
            f"epoch {epoch}  loss {mean_loss:.3f}  {took}  {1 - sum(lengths) / num_all:.0%} of a batch is padding"
        )

    output = step.evaluate(*pad(test)).output
    accuracy = (output.argmax(1).cpu() == pad(test)[1]).float().mean()
    console.print(f"test accuracy {accuracy:.3f}; {len(shapes)} shapes of batches")


if __name__ == "__main__":
    main()
