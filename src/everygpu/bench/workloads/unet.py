"""A U-Net that segments images, as the paper has it, with BatchNorm."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images of shape (rows, 3, height, width) in, a logit for each class and pixel out; sizes divide by 16."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512, 1024), num_classes: int = 21) -> None:
        super().__init__()
        self.down = nn.ModuleList(_double(i, o) for i, o in zip((3, *widths), widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1]))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in pairs)
        self.up = nn.ModuleList(_double(i, o) for i, o in pairs)
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for grow, block, other in zip(self.grow, self.up, kept[-2::-1]):
            x = block(torch.cat((other, grow(x)), 1))
        logits: Tensor = self.head(x)
        return logits


def unet(*, rows: int = 16, size: int = 256, widths: Sequence[int] = (64, 128, 256, 512, 1024)) -> tuple[Any, ...]:
    """31M parameters, 16 × 3 × 256 × 256, channels last, AdamW."""
    model = UNet(widths).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(rows, 3, size, size).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, F.cross_entropy, optimizer, (images, torch.randint(0, 21, (rows, size, size)))
