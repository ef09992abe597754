"""Training loops as users write them: they know a function ``wrap``, and not what it makes of a module."""

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_leaves

import everygpu
from tests.parallel.programs.blocks import WIDTH, Averaged, Tempered
from tests.parallel.programs.network import CALLS, IGNORED, IN_MODEL, NUM_OUTPUTS, NUM_TOKENS, Answer, logits_of

EPS = 1e-4
"""Adam's: what rounding leaves of a gradient that is zero, as that of a bias before a norm, must not become a step."""

Wrap = Callable[[nn.Module], nn.Module]
Batch = dict[str, Tensor]


def make_batch(program: Any, device: torch.device, step: int, part: int) -> Batch:
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


def read_on_host(loss: Tensor) -> Tensor:
    return loss if loss.item() < 1e9 else loss * 2


def loss_of(name: str, logits: Tensor, batch: Batch) -> Tensor:
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

    def __init__(self, program: Any, wrap: Wrap, make: Callable[[], nn.Module], device: torch.device) -> None:
        self.program, self.wrap, self.device = program, wrap, device
        self.make = lambda: wrap(make().to(device, program.dtype))
        self.model = self.make()
        self.teacher: nn.Module | None = None
        self.average: torch.optim.swa_utils.AveragedModel | None = None
        self.hooks: list[Any] = []
        self.seen: list[Any] = []
        self.make_optimizers()

    def make_optimizers(self) -> None:
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
        if self.program.by_step:
            name = self.program.loss
            read = read_on_host if self.program.reads_loss else lambda loss: loss
            loss = None if name in IN_MODEL else lambda output, batch: read(loss_of(name, logits_of(output), batch))
            self.step = everygpu.TrainStep(self.model, loss, *self.optimizers, accumulate=self.program.num_parts)

    def own_rows(self, batch: Batch) -> Batch:
        """Return what a rank trains on; the first has the fewest rows."""
        rank, size = self.program.share
        ends = [len(batch["x"]) * (i * i + i) // (size * size + size) for i in range(size + 1)]
        return {name: value[ends[rank] : ends[rank + 1]] for name, value in batch.items()}

    def take_step(self, batch: Batch) -> Tensor:
        """Do all that ``plain``, and the update after the last part, do with a batch."""
        args, kwargs = self.call(lambda *args, **kwargs: (args, kwargs), batch)
        if self.program.loss in IN_MODEL:
            return self.step(args, y=batch["y"], **kwargs)
        return self.step(args, {name: batch[name] for name in ("y", "classes")}, **kwargs)

    def watch(self, value: Any) -> None:
        self.seen.append(value.detach().clone() if isinstance(value, Tensor) else value)

    def call(self, model: Callable[..., Any], batch: Batch, **more: Any) -> Any:
        return CALLS[self.program.call](model, batch["x"], batch["weight"], **more)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the model; return the loss, and something else that has a gradient."""
        name = self.program.loss
        with self.cast():
            if name not in IN_MODEL:
                logits = logits_of(self.call(self.model, batch))
                return loss_of(name, logits, batch), logits
            answer = self.call(self.model, batch, y=batch["y"])
            loss = answer["loss"] if isinstance(answer, dict) else answer
            loss = loss.mean() if IN_MODEL[name] == "mean" else loss.sum() / 100
            return loss, loss

    def scaled(self, loss: Tensor) -> Tensor:
        return loss / self.program.num_parts

    def cast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.program.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not self.program.keeps_grads)

    def update(self) -> None:
        for optimizer in () if self.program.by_step else self.optimizers:
            optimizer.step()
        for module in self.model.modules():
            if isinstance(module, Averaged):
                module.follow(is_counted=self.program.counts_writes)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        self.model.eval()
        with torch.no_grad(), self.cast():
            yield
        self.model.train()


LOOPS: dict[str, Callable[[Training, Batch], Tensor]] = {}
"""What a program does with a batch, up to the gradients."""


def loop(name: str) -> Callable[[Any], Any]:
    return lambda function: LOOPS.setdefault(name, function)


@loop("plain")
def plain(t: Training, batch: Batch) -> Tensor:
    loss, _ = t.loss(batch)
    t.scaled(loss).backward()
    return loss


@loop("two forwards")
def two_forwards(t: Training, batch: Batch) -> Tensor:
    first, one = t.loss(batch)
    second, other = t.loss({**batch, "weight": batch["weight"].flip(0), "x": batch["x"].flip(0)})
    loss = first * second + 0.1 * F.mse_loss(one, other.detach())
    t.scaled(loss).backward()
    return loss


@loop("evaluation before backward")
def evaluation_before_backward(t: Training, batch: Batch) -> Tensor:
    loss, _ = t.loss(batch)
    with t.evaluation():
        t.watch(t.loss({**batch, "weight": batch["weight"] * 2})[0])
    t.scaled(loss).backward()
    return loss


@loop("two backwards")
def two_backwards(t: Training, batch: Batch) -> Tensor:
    loss, values = t.loss(batch)
    t.scaled(loss).backward(retain_graph=True)
    (values.float() if t.program.autocast else values).square().mean().mul(0.1).backward()
    return loss


@loop("backward twice")
def backward_twice(t: Training, batch: Batch) -> Tensor:
    loss, _ = t.loss(batch)
    t.scaled(loss).backward(retain_graph=True)
    t.scaled(loss).backward()
    return loss


@loop("gradient penalty")
def gradient_penalty(t: Training, batch: Batch) -> Tensor:
    x = batch["weight"].requires_grad_()
    loss, values = t.loss(batch)
    (grad,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    total = loss + 0.1 * grad.square().sum() / len(x)
    t.scaled(total).backward()
    return total


@loop("penalised parameter gradients")
def penalised_parameter_gradients(t: Training, batch: Batch) -> Tensor:
    loss, _ = t.loss(batch)
    parameters = [p for p in t.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    total = loss + 0.1 * torch.stack([g.square().sum() for g in grads if g is not None]).sum()
    t.scaled(total).backward()
    return total


@loop("gradients by autograd.grad")
def gradients_by_autograd_grad(t: Training, batch: Batch) -> Tensor:
    loss, _ = t.loss(batch)
    parameters = [p for p in t.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(t.scaled(loss), parameters, allow_unused=True)
    for p, grad in zip(parameters, grads):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad + grad
    return loss


@loop("input gradients")
def input_gradients(t: Training, batch: Batch) -> Tensor:
    taking = [value.requires_grad_() for name in ("x", "weight") if (value := batch[name]).is_floating_point()]
    loss = plain(t, batch)
    for value in taking:
        t.watch(value.grad)
    return loss


@loop("averaged teacher")
def averaged_teacher(t: Training, batch: Batch) -> Tensor:
    """Learn from a moving average of the model, as semi-supervised training does."""
    if t.teacher is None:
        t.teacher = copy.deepcopy(t.model).requires_grad_(False)
    with t.cast():
        with torch.no_grad():
            target = logits_of(t.call(t.teacher, batch))
        answer = logits_of(t.call(t.model, batch))
        loss = F.mse_loss(answer, batch["y"]) + F.mse_loss(answer, target)
    t.scaled(loss).backward()
    follow(t.teacher, t.model)
    return loss


@torch.no_grad()
def follow(teacher: nn.Module, model: nn.Module) -> None:
    students = dict(model.named_parameters())
    for name, mean in teacher.named_parameters():
        mean.lerp_(students[name], 0.3)


BEFORE, AFTER_BACKWARD, AFTER_STEP = "before", "after backward", "after step"
EVENTS: dict[str, tuple[str, Callable[[Training, int], None]]] = {}
"""What happens between steps, and between backward and the update, and when."""


def event(name: str, when: str) -> Callable[[Any], Any]:
    return lambda function: EVENTS.setdefault(name, (when, function))[1]


@event("clipped gradients", AFTER_BACKWARD)
def clip(t: Training, step: int) -> None:
    t.watch(torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1))


@event("gradients read", AFTER_BACKWARD)
def read_grads(t: Training, step: int) -> None:
    for p in t.model.parameters():
        t.watch(None if p.grad is None else p.grad)


@event("gradients changed", AFTER_BACKWARD)
def change_grads(t: Training, step: int) -> None:
    for p in t.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.8).add_(0.001)


@event("scheduled rate", AFTER_STEP)
def step_schedulers(t: Training, step: int) -> None:
    for scheduler in t.schedulers:
        scheduler.step()


@event("frozen midway", BEFORE)
def freeze(t: Training, step: int) -> None:
    """Freeze the first parameters for two steps."""
    first = list(t.model.parameters())[:2]
    if step in (1, 3):
        for p in first:
            p.requires_grad_(step == 3)


@event("block added midway", BEFORE)
def add_block(t: Training, step: int) -> None:
    if step == 2 and t.program.kind == "classifier":
        extra = nn.Linear(WIDTH, WIDTH).to(t.device, t.program.dtype)
        t.model.add_module("extra", extra)
        t.optimizers[0].add_param_group({"params": list(extra.parameters())})


@event("resumed midway", BEFORE)
def resume(t: Training, step: int) -> None:
    """Save everything, make it anew, and load."""
    if step == 2:
        file = io.BytesIO()
        torch.save([t.model.state_dict(), *(o.state_dict() for o in t.optimizers)], file)
        file.seek(0)
        own, *others = torch.load(file)
        if "extra.weight" in own:
            return
        t.model = t.make()
        t.model.load_state_dict(own)
        t.make_optimizers()
        for optimizer, state in zip(t.optimizers, others):
            optimizer.load_state_dict(state)


@event("state dict put back", BEFORE)
def put_back(t: Training, step: int) -> None:
    """Spoil the weights, and load those of before."""
    if step == 3:
        state = {name: value.clone() for name, value in t.model.state_dict().items()}
        with torch.no_grad():
            for p in t.model.parameters():
                p.mul_(0.5)
        t.watch(sorted(state))
        t.model.load_state_dict(state)


@event("attributes scheduled", BEFORE)
def schedule_attributes(t: Training, step: int) -> None:
    for module in t.model.modules():
        if isinstance(module, Tempered):
            module.temperature = 1.0 + step
            module.mode = "product" if step % 3 == 1 else "sum"
            module.gains[0] = 0.9**step
            if step == 2:
                module.gains.append(0.7)


def show(t: Training, model: nn.Module, step: int) -> None:
    """Note what a model says of other rows."""
    batch = make_batch(t.program, t.device, step, 7)
    if t.program.kind == "carried state":
        out, _ = model(batch["x"])
    elif t.program.kind == "adversarial pair":
        out = model(batch["noise"])
    else:
        out = t.call(model, batch)
    for leaf in tree_leaves(vars(out) if isinstance(out, Answer) else out):
        t.watch(leaf)


@event("evaluated", AFTER_STEP)
def evaluate(t: Training, step: int) -> None:
    with t.evaluation():
        show(t, t.model, step)


@event("copy evaluated", AFTER_STEP)
def evaluate_copy(t: Training, step: int) -> None:
    if step % 2:
        clone = copy.deepcopy(t.model).eval()
        with torch.no_grad(), t.cast():
            show(t, clone, step)


@event("swapped weights evaluated", AFTER_STEP)
def evaluate_swapped(t: Training, step: int) -> None:
    """Evaluate with weights that are put in place of the model's for a while."""
    kept = [p.data for p in t.model.parameters()]
    for p in t.model.parameters():
        p.data = p.data * 0.5
    evaluate(t, step)
    for p, data in zip(t.model.parameters(), kept):
        p.data = data


def trained_parameters(t: Training) -> list[nn.Parameter]:
    return [p for p in t.model.parameters() if p.requires_grad]


def remove_hooks(t: Training) -> None:
    while t.hooks:
        t.hooks.pop().remove()


@event("tensor hooks", BEFORE)
def hook_tensors(t: Training, step: int) -> None:
    """Clamp whole gradients: of parts of them it would give something else."""
    if step == 1:
        t.hooks += [p.register_hook(lambda g: g.clamp(-0.02, 0.02)) for p in trained_parameters(t)[-2:]]
    if step == 4:
        remove_hooks(t)


def halve_grad(p: Tensor) -> None:
    p.grad.mul_(0.5)


@event("accumulation hooks", BEFORE)
def hook_accumulation(t: Training, step: int) -> None:
    if step == 1:
        t.hooks += [p.register_post_accumulate_grad_hook(halve_grad) for p in trained_parameters(t)[:2]]


@event("forward hooks", BEFORE)
def hook_forwards(t: Training, step: int) -> None:
    linear = [module for module in t.model.modules() if type(module) is nn.Linear]
    if step == 1:
        t.hooks.append(linear[-1].register_forward_hook(lambda module, args, out: out * 0.5 + module.bias.sum()))
    if step == 3:
        remove_hooks(t)


def halve_input_grads(module: nn.Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if g is None else g / 2 for g in grad_input)


@event("backward hooks", BEFORE)
def hook_backwards(t: Training, step: int) -> None:
    if step == 1:
        t.hooks.append(t.model.head.register_full_backward_hook(halve_input_grads))
    if step == 4:
        remove_hooks(t)


@event("weights edited", BEFORE)
def edit_weights(t: Training, step: int) -> None:
    """Write parameters as constraints and averages do: in place, through ``.data``, and by other memory."""
    first, *_, last = t.model.parameters()
    with torch.no_grad():
        first.clamp_(-1, 1)
    last.data.mul_(0.9)
    if t.program.by_step:
        t.step.refresh()
    if step == 2:
        first.data = first.data + 0.01


@event("weights in one vector", BEFORE)
def flatten_weights(t: Training, step: int) -> None:
    """Have all parameters share one storage, as natural-gradient code and model merging do."""
    if step in (1, 2):
        vector = parameters_to_vector(t.model.parameters())
        vector_to_parameters(vector * 0.9, t.model.parameters())


@event("gradients replaced", AFTER_BACKWARD)
def replace_grads(t: Training, step: int) -> None:
    """Put other tensors in place of gradients, which ``zero_grad(set_to_none=False)`` writes then."""
    for p in t.model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


@event("copied midway", BEFORE)
def copy_model(t: Training, step: int) -> None:
    if step == 2:
        t.model = copy.deepcopy(t.model)
        t.make_optimizers()


@event("head replaced midway", BEFORE)
def replace_head(t: Training, step: int) -> None:
    """Put another layer in the head's place, as fine-tuning does."""
    if step == 2:
        old = t.model.head
        t.model.head = nn.Linear(old.in_features, old.out_features).to(t.device, t.program.dtype)
        t.optimizers[-1].add_param_group({"params": list(t.model.head.parameters())})


@event("averaged by swa_utils", AFTER_STEP)
def average(t: Training, step: int) -> None:
    """Average the last weights by torch's own tool, and evaluate with them."""
    if step == 3:
        t.average = torch.optim.swa_utils.AveragedModel(t.model)
    if step >= 3 and t.average is not None and not hasattr(t.model, "extra"):
        t.average.update_parameters(t.model)
        with torch.no_grad(), t.cast():
            show(t, t.average.module.eval(), step)
