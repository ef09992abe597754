"""Training loops as well-known public programs write them, each equal to the same loop on one device."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import everygpu
from tests.parallel.oracle import TOLERANCE

Wrap = Callable[..., nn.Module]
Found = Iterator[Tensor]


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


class Memories(nn.Module):
    """Tokens on dim 0, rows on dim 1; takes and returns what each layer saw before, beside a loss for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.layers = nn.ModuleList(nn.MultiheadAttention(6, 2) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor, *memories: Tensor) -> list[Tensor]:
        h = self.embed(tokens.view(-1)).view(*tokens.shape, 6)
        seen = [h]
        for i, layer in enumerate(self.layers):
            context = torch.cat([memories[i], h]) if memories else h
            h = h + layer(h, context, context, need_weights=False)[0]
            seen.append(h)
        losses = F.cross_entropy(self.head(h).flatten(0, 1), targets.view(-1), reduction="none").view(targets.shape)
        kept = [torch.cat([m, s])[-5:] for m, s in zip(memories, seen)] if memories else seen
        return [losses, *(k.detach() for k in kept)]


def transformer_with_memories(wrap: Wrap, home: torch.device) -> Found:
    net = Memories().to(home, torch.float64)
    model, optimizer = wrap(net, dim=1), torch.optim.Adam(net.parameters(), lr=0.01)
    tokens, memories = torch.randint(0, 11, (13, 7), device=home), ()
    for i in range(0, 12, 4):
        net.zero_grad()
        losses, *memories = model(tokens[i : i + 4], tokens[i + 1 : i + 5], *memories)
        loss = losses.mean()
        loss.backward()
        optimizer.step()
        yield loss
    yield from net.parameters()


class Noise(Tensor):
    """Knows how it is drawn, and keeps that where it is moved."""

    def draw_from(self, spread: float) -> "Noise":
        self.spread = spread
        return self

    def draw(self) -> None:
        self.copy_(rand(*self.shape) * self.spread)

    def to(self, *args: Any, **kwargs: Any) -> "Noise":
        return super().to(*args, **kwargs).as_subclass(Noise).draw_from(self.spread)


class BothNets(nn.Module):
    """Generator and discriminator in one forward, on real and made rows at once."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, z: Tensor, real: Tensor | None = None, *, trains_generator: bool = False) -> Any:
        with torch.set_grad_enabled(trains_generator):
            made = self.generator(z)
        if real is None:
            return self.discriminator(made)
        scores = self.discriminator(torch.cat([made, real]))
        return torch.split(scores, [len(made), len(real)])


def generator_with_noise(wrap: Wrap, home: torch.device) -> Found:
    generator = nn.Linear(3, 4).to(home, torch.float64)
    discriminator = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 1)).to(home, torch.float64)
    model = wrap(BothNets(generator, discriminator))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (generator, discriminator)]
    noise = rand(8, 3).as_subclass(Noise).draw_from(2.0).to(home)
    for _ in range(3):
        noise.draw()
        optimizers[1].zero_grad()
        made, real = model(noise[:7], rand(7, 4).to(home))
        loss = F.relu(1 - real).mean() + F.relu(1 + made).mean()
        loss.backward()
        optimizers[1].step()
        yield loss
        noise.draw()
        optimizers[0].zero_grad()
        loss = -model(noise, trains_generator=True).mean()
        loss.backward()
        optimizers[0].step()
        yield loss
    yield from generator.parameters()
    yield from discriminator.parameters()


class Detector(nn.Module):
    """Takes images of several sizes and a dict for each; returns losses, or a dict for each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classes = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        maps = [self.conv(image[None])[0] for image in images]
        if targets is None:
            return everygpu.Rows({"boxes": m.new_ones(m.shape[1] - 4, 4), "scores": m.mean((1, 2))} for m in maps)
        logits = torch.stack([self.classes(m.mean((1, 2))) for m in maps])
        labels = torch.stack([target["label"] for target in targets])
        sizes = torch.stack([m.mean() - target["boxes"].mean() for m, target in zip(maps, targets)])
        return {"classes": F.cross_entropy(logits, labels), "boxes": sizes.square().mean()}


def detector(wrap: Wrap, home: torch.device) -> Found:
    net = Detector().to(home, torch.float64)
    model, optimizer = wrap(net), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for num_images in (5, 4, 2):
        images = everygpu.Rows(rand(3, 5 + i % 2, 6).to(home) for i in range(num_images))
        targets = everygpu.Rows(
            {"boxes": rand(1 + i % 3, 4).to(home), "label": torch.tensor(i, device=home)} for i in range(num_images)
        )
        loss = sum(part.mean() for part in model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    for found in model(images):
        yield from found.values()
    yield from net.parameters()


class Actor(nn.Module):
    """Times on dim 0, rows on dim 1; its state begins anew where a row is done."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.policy, self.value = nn.LSTM(4, 5), nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, inputs: dict[str, Tensor], state: tuple[Tensor, ...]) -> Any:
        outputs = []
        for frame, done in zip(inputs["frame"].unbind(), inputs["done"].unbind()):
            state = tuple(torch.where(done.view(1, -1, 1), 0, s) for s in state)
            out, state = self.core(frame[None], state)
            outputs.append(out)
        h = torch.cat(outputs)
        return {"logits": self.policy(h), "value": self.value(h).squeeze(-1)}, state


def actor_with_state(wrap: Wrap, home: torch.device) -> Found:
    net = Actor().to(home, torch.float64)
    model, optimizer = wrap(net, dim=1), torch.optim.RMSprop(net.parameters(), lr=0.01)
    state = tuple(torch.zeros(1, 7, 5, dtype=torch.float64, device=home) for _ in range(2))
    for _ in range(3):
        inputs = {"frame": rand(3, 7, 4).to(home), "done": (rand(3, 7) > 0.7).to(home)}
        out, state = model(inputs, state)
        state = tuple(s.detach() for s in state)
        log_p = out["logits"].log_softmax(-1)
        gain = log_p.gather(-1, log_p.argmax(-1, keepdim=True)).squeeze(-1)
        loss = -(gain * (1 - out["value"]).detach()).sum() + (1 - out["value"]).square().sum()
        loss = loss + 0.01 * (log_p.exp() * log_p).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 40.0)
        optimizer.step()
        yield loss
    yield from state
    yield from net.parameters()


@pytest.mark.parametrize("program", [transformer_with_memories, generator_with_noise, detector, actor_with_state])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_public_program(devices: Callable[[int], list[torch.device]], program: Any, num_replicas: int) -> None:
    used, runs = devices(num_replicas), []
    for wrap in (lambda module, **_: module, lambda module, **more: everygpu.DataParallel(module, used, **more)):
        torch.manual_seed(0)
        runs.append([everygpu.parallel.gather(x).detach().clone() for x in program(wrap, used[0])])
    torch.testing.assert_close(*runs, **TOLERANCE)
