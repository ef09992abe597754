"""Train a GAN: two models, two optimizers, and losses that go through both models.

The generator learns to place points on a ring of eight spots, and a drawing shows where they are. Copy this to train
several models together, as in distillation, with actor and critic, or with a frozen teacher.

    python examples/gan.py                           # all GPUs, or two replicas on the CPU
    python examples/gan.py --replicas 3 --steps 200  # three replicas on the CPU, for a shorter time
"""

import argparse
import math
import time

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import everygpu

console = Console(highlight=False)
NUM_SPOTS, SPREAD, NOISE = 8, 0.1, 16


def draw_real(rows: int) -> Tensor:
    """Draw points of shape (rows, 2) around the spots."""
    angles = torch.randint(NUM_SPOTS, (rows,)) * (2 * math.pi / NUM_SPOTS)
    return torch.stack([angles.cos(), angles.sin()], 1) + SPREAD * torch.randn(rows, 2)


def make_network(inputs: int, outputs: int, width: int = 128) -> nn.Module:
    layers = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def loss_of(scores: Tensor, target: float) -> Tensor:
    """Measure how far scores are from 1 (real) or 0 (generated), for every row."""
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def train_step(
    generator: nn.Module, discriminator: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], rows: int
) -> tuple[Tensor, Tensor]:
    """Update each model once, against the other one."""
    of_generator, of_discriminator = optimizers
    made = generator(torch.randn(rows, NOISE))

    of_discriminator.zero_grad()
    loss_d = loss_of(discriminator(draw_real(rows)), 1.0) + loss_of(discriminator(made.detach()), 0.0)
    loss_d.backward()
    of_discriminator.step()

    of_generator.zero_grad()
    loss_g = loss_of(discriminator(made), 1.0)
    loss_g.backward()
    of_generator.step()  # the discriminator's next zero_grad clears what this adds to its gradients
    return loss_d.detach(), loss_g.detach()


def count_good(points: Tensor) -> tuple[float, int]:
    """Return the share of points near a spot, and how many spots have at least one in fifty of them."""
    angles = torch.arange(NUM_SPOTS) * (2 * math.pi / NUM_SPOTS)
    distance, spot = torch.cdist(points, torch.stack([angles.cos(), angles.sin()], 1)).min(1)
    near = distance < 3 * SPREAD
    counts = torch.bincount(spot[near], minlength=NUM_SPOTS)
    return near.float().mean().item(), int((counts > len(points) / 50).sum())


def draw(points: Tensor, width: int = 48, height: int = 20) -> str:
    """Draw points between -1.5 and 1.5 as text."""
    x, y = ((points.clamp(-1.5, 1.5) + 1.5) / 3 * torch.tensor([width - 1, height - 1])).round().long().T
    counts = torch.zeros(height, width, dtype=torch.long).index_put_((y, x), torch.tensor(1), accumulate=True)
    return "\n".join("".join(" .:*#"[min(count, 4)] for count in line) for line in counts.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="replicas on the CPU, instead of all GPUs")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256)
    options = parser.parse_args()

    everygpu.seed_all(0)
    device_ids = None if torch.cuda.is_available() and options.replicas is None else ["cpu"] * (options.replicas or 2)
    generator = everygpu.DataParallel(make_network(NOISE, 2), device_ids)
    discriminator = everygpu.DataParallel(make_network(2, 1), device_ids)
    optimizers = tuple(
        torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.99)) for model in (generator, discriminator)
    )
    console.print(f"training on {', '.join(map(str, generator.replica_devices))}")

    mean_d, mean_g, begin = everygpu.Meter(), everygpu.Meter(), time.perf_counter()
    for i in range(1, options.steps + 1):
        loss_d, loss_g = train_step(generator, discriminator, optimizers, options.batch_size)
        mean_d.update(loss_d)
        mean_g.update(loss_g)
        if i % max(1, options.steps // 10) == 0:
            rate = i * options.batch_size / (time.perf_counter() - begin)
            console.print(f"step {i:4}  discriminator {mean_d:.3f}  generator {mean_g:.3f}  {rate:,.0f} rows/s")
            mean_d.reset()
            mean_g.reset()

    with torch.no_grad():
        points = generator(torch.randn(1000, NOISE)).cpu()
    share, spots = count_good(points)
    console.print(draw(points))
    console.print(f"{share:.0%} of the points near a spot, {spots} of {NUM_SPOTS} spots found")


if __name__ == "__main__":
    main()
