"""What cuDNN's recurrent layers with dropout need before they can be recorded."""

from collections.abc import Sequence

import torch
from torch import nn


def draw_seeds(roots: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Have cuDNN draw the seed of recurrent layers' dropout now, where it has yet to.

    It does so in the first call after a generator's state was set, by reading a random number back from the GPU, which
    can't be recorded. Dynamo sets the state, and so does a launch.

    Args:
        roots: The modules that take part.
        devices: One per replica.
    Source:
        ``get_dropout_state`` in PyTorch's ``aten/src/ATen/native/cudnn/RNN.cpp``.
    """
    if not any(isinstance(m, nn.RNNBase) and m.training and m.dropout for root in roots for m in root.modules()):
        return
    for device in devices:
        if device.type == "cuda":
            _run_smallest(device)


def _run_smallest(device: torch.device) -> None:
    layer = nn.RNN(1, 1, num_layers=2, dropout=0.5, device=device)
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        layer(torch.zeros(1, 1, 1, device=device))
