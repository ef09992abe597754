"""A U-Net that finds the noise in images, as in diffusion models."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """Two convolutions after group normalization, beside a shortcut."""

    def __init__(self, num_in: int, num_out: int, num_groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(num_groups, num_in), nn.Conv2d(num_in, num_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(num_groups, num_out), nn.Conv2d(num_out, num_out, 3, padding=1)
        self.shortcut = nn.Conv2d(num_in, num_out, 1) if num_in != num_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        changed = self.conv1(F.silu(self.norm1(x)))
        changed = self.conv2(F.silu(self.norm2(changed)))
        joined: Tensor = changed + self.shortcut(x)
        return joined


class UNet(nn.Module):
    """Halves the image between levels and doubles it again, with a skip connection at each level."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512), num_channels: int = 3, num_groups: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(num_channels, widths[0], 3, padding=1)
        self.encoders = nn.ModuleList(ResidualBlock(w, w, num_groups) for w in widths[:-1])
        self.downs = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths))
        self.middle = ResidualBlock(widths[-1], widths[-1], num_groups)
        steps_up = list(pairwise(widths[::-1]))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in steps_up)
        self.decoders = nn.ModuleList(ResidualBlock(2 * b, b, num_groups) for _, b in steps_up)
        self.norm, self.head = nn.GroupNorm(num_groups, widths[0]), nn.Conv2d(widths[0], num_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for encoder, down in zip(self.encoders, self.downs):
            x = encoder(x)
            skips.append(x)
            x = down(x)
        x = self.middle(x)
        for up, decoder in zip(self.ups, self.decoders):
            x = decoder(torch.cat((up(x), skips.pop()), dim=1))
        noise: Tensor = self.head(F.silu(self.norm(x)))
        return noise


def unet(*, rows: int = 32, size: int = 128, widths: Sequence[int] = (64, 128, 256, 512)) -> tuple[Any, ...]:
    """11M parameters, 32 × 3 × 128 × 128, AdamW."""
    model = UNet(widths)
    clean, noise = torch.rand(rows, 3, size, size), torch.randn(rows, 3, size, size)
    return model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=1e-4), (clean + noise, noise)
