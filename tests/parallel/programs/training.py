"""Training loops as users write them: they know a function ``wrap``, and not what it makes of a module."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.programs.blocks import Averaged
from tests.parallel.programs.network import CALLS, IGNORED, IN_MODEL, NUM_OUTPUTS, NUM_TOKENS, logits_of
from tests.parallel.programs.program import Program

EPS = 1e-5
"""Adam's: what rounding leaves of a gradient that is zero, as that of a bias before a norm, must not become a step."""

Wrap = Callable[[nn.Module], nn.Module]
Batch = dict[str, Tensor]


def make_batch(program: Program, device: torch.device, step: int, part: int) -> Batch:
    """Make the batch of a moment: the same one whatever the program did before."""
    draw = torch.Generator().manual_seed(1000 * program.seed + 10 * step + part)
    num_rows, length = program.num_rows(step, part), program.lengths[step % len(program.lengths)]
    dims = (num_rows, length) if program.has_length else (num_rows,)
    float_ = {"generator": draw, "dtype": program.dtype}
    x = torch.randn(num_rows, 2, 5, 5, **float_) if program.stem == "images" else torch.randn(*dims, 5, **float_)
    if program.kind == "carried state":
        x = torch.randn(*dims, 5, **float_)
    elif program.stem == "tokens":
        x = torch.randint(NUM_TOKENS, dims, generator=draw)
    classes = torch.randint(NUM_OUTPUTS, dims, generator=draw)
    classes.view(-1)[1::3] = IGNORED
    made = {"x": x, "weight": torch.rand(num_rows, 1, **float_) + 0.5, "classes": classes}
    made |= {"y": torch.randn(*dims, NUM_OUTPUTS, **float_), "noise": torch.randn(num_rows, 3, **float_)}
    made["real"] = torch.randn(num_rows, 5, **float_)
    return {name: value.to(device) for name, value in made.items()}


def loss_of(name: str, logits: Tensor, batch: Batch) -> Tensor:
    """Compute a loss on the whole batch."""
    if name == "cross entropy":
        return F.cross_entropy(logits.flatten(0, -2), batch["classes"].flatten(), ignore_index=IGNORED)
    if name == "bce":
        return F.binary_cross_entropy_with_logits(logits, batch["y"].sigmoid())
    if name == "smooth l1":
        return F.smooth_l1_loss(logits, batch["y"])
    return F.mse_loss(logits, batch["y"])


class Training:
    """What a training script has at its top level.

    Args:
        program: Says what to do.
        wrap: Makes the model of a module.
        make: Makes the module.
        device: Where batches are.
    """

    def __init__(self, program: Program, wrap: Wrap, make: Callable[[], nn.Module], device: torch.device) -> None:
        self.program, self.wrap, self.device = program, wrap, device
        self.make = lambda: wrap(make().to(device, program.dtype))
        self.model = self.make()
        self.teacher: nn.Module | None = None
        self.average: torch.optim.swa_utils.AveragedModel | None = None
        self.hooks: list[Any] = []
        self.seen: list[Any] = []
        self.make_optimizers()

    def make_optimizers(self) -> None:
        """Make the optimizers of the parameters that there are now."""
        parameters = list(self.model.parameters())
        kinds: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=EPS),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=EPS, weight_decay=0.1),
        }
        if self.program.optimizer == "two optimizers":
            half = len(parameters) // 2
            self.optimizers = [kinds["sgd"](parameters[:half]), kinds["adamw"](parameters[half:])]
        else:
            self.optimizers = [kinds[self.program.optimizer](parameters)]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in self.optimizers]

    def watch(self, value: Any) -> None:
        """Note what the program sees."""
        self.seen.append(value.detach().clone() if isinstance(value, Tensor) else value)

    def call(self, model: nn.Module, batch: Batch, **more: Any) -> Any:
        """Call a model in the program's way."""
        return CALLS[self.program.call](model, batch["x"], batch["weight"], **more)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the model; return the loss, and something else that has a gradient."""
        name = self.program.loss
        if name not in IN_MODEL:
            logits = logits_of(self.call(self.model, batch))
            return loss_of(name, logits, batch), logits
        answer = self.call(self.model, batch, y=batch["y"])
        loss = answer["loss"] if isinstance(answer, dict) else answer
        loss = loss.mean() if IN_MODEL[name] == "mean" else loss.sum() / 100
        return loss, loss

    def cast(self) -> contextlib.AbstractContextManager[Any]:
        """Give the context that forwards run in."""
        if not self.program.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not self.program.keeps_grads)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for module in self.model.modules():
            if isinstance(module, Averaged):
                module.follow(is_counted=self.program.counts_writes)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluate within."""
        self.model.eval()
        with torch.no_grad(), self.cast():
            yield
        self.model.train()
