"""Models with recurrent layers, whose weights are in a list besides."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_TOKENS = 11


class LanguageModel(nn.Module):
    """Embedding, recurrent layers, scores of the next token."""

    def __init__(self, cells: Callable[..., nn.RNNBase], **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(NUM_TOKENS, 8)
        self.cells = cells(8, 8, batch_first=True, **options)
        width = 16 if self.cells.bidirectional else 8
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        self.cells.flatten_parameters()  # nothing on the CPU; on GPUs it moves the weights
        scores: Tensor = self.head(self.cells(self.embedding(tokens))[0])
        return scores


MODELS: dict[str, Callable[[], LanguageModel]] = {
    "LSTM": lambda: LanguageModel(nn.LSTM, num_layers=2),
    "LSTM both ways": lambda: LanguageModel(nn.LSTM, bidirectional=True),
    "GRU": lambda: LanguageModel(nn.GRU, bias=False),
    "RNN": lambda: LanguageModel(nn.RNN, nonlinearity="relu"),
}


def make_tokens(num: int, rows: int = 6, lengths: Sequence[int] = (4,)) -> list[tuple[Tensor, Tensor]]:
    """Make batches, as many rows for each replica, of these lengths in turn, with the token after each."""
    generator = torch.Generator().manual_seed(1)
    each = [lengths[i % len(lengths)] for i in range(num)]
    drawn = [torch.randint(0, NUM_TOKENS, (rows, length), generator=generator) for length in each]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in drawn]


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), following.to(scores.device).flatten())


def train_one_device(net: nn.Module, device: torch.device, num: int, lengths: Sequence[int] = (4,)) -> list[Tensor]:
    """Train without everygpu, for what others are compared with."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in make_tokens(num, lengths=lengths):
        loss = loss_of(net(x.to(device)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses
