"""What a program does with a batch, up to the gradients."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.programs.network import logits_of
from tests.parallel.programs.training import Batch, Training

Loop = Callable[[Training, Batch], Tensor]


def plain(t: Training, batch: Batch) -> Tensor:
    with t.cast():
        loss, _ = t.loss(batch)
    scaled(t, loss).backward()
    return loss


def scaled(t: Training, loss: Tensor) -> Tensor:
    """Divide by the number of batches before an update."""
    return loss / t.program.num_parts


def two_forwards(t: Training, batch: Batch) -> Tensor:
    with t.cast():
        first, one = t.loss(batch)
        second, other = t.loss({**batch, "weight": batch["weight"].flip(0), "x": batch["x"].flip(0)})
        loss = first * second + 0.1 * F.mse_loss(one, other.detach())
    scaled(t, loss).backward()
    return loss


def evaluation_before_backward(t: Training, batch: Batch) -> Tensor:
    with t.cast():
        loss, _ = t.loss(batch)
    with t.evaluation():
        t.watch(t.loss({**batch, "weight": batch["weight"] * 2})[0])
    scaled(t, loss).backward()
    return loss


def two_backwards(t: Training, batch: Batch) -> Tensor:
    with t.cast():
        loss, values = t.loss(batch)
    scaled(t, loss).backward(retain_graph=True)
    (values.float() if t.program.autocast else values).square().mean().mul(0.1).backward()
    return loss


def backward_twice(t: Training, batch: Batch) -> Tensor:
    with t.cast():
        loss, _ = t.loss(batch)
    scaled(t, loss).backward(retain_graph=True)
    scaled(t, loss).backward()
    return loss


def gradient_penalty(t: Training, batch: Batch) -> Tensor:
    x = batch["weight"].requires_grad_()
    with t.cast():
        loss, values = t.loss(batch)
    (grad,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    total = loss + 0.1 * grad.square().sum() / len(x)
    scaled(t, total).backward()
    return total


def penalised_parameter_gradients(t: Training, batch: Batch) -> Tensor:
    with t.cast():
        loss, _ = t.loss(batch)
    parameters = [p for p in t.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    total = loss + 0.1 * torch.stack([g.square().sum() for g in grads if g is not None]).sum()
    scaled(t, total).backward()
    return total


def gradients_by_autograd_grad(t: Training, batch: Batch) -> Tensor:
    with t.cast():
        loss, _ = t.loss(batch)
    parameters = [p for p in t.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(scaled(t, loss), parameters, allow_unused=True)
    for p, grad in zip(parameters, grads):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad + grad
    return loss


def input_gradients(t: Training, batch: Batch) -> Tensor:
    taking = [value.requires_grad_() for name in ("x", "weight") if (value := batch[name]).is_floating_point()]
    loss = plain(t, batch)
    for value in taking:
        t.watch(value.grad)
    return loss


def averaged_teacher(t: Training, batch: Batch) -> Tensor:
    """Learn from a moving average of the model, as semi-supervised training does."""
    if t.teacher is None:
        t.teacher = copy.deepcopy(t.model).requires_grad_(False)
    with t.cast():
        with torch.no_grad():
            target = logits_of(t.call(t.teacher, batch))
        answer = logits_of(t.call(t.model, batch))
        loss = F.mse_loss(answer, batch["y"]) + F.mse_loss(answer, target)
    scaled(t, loss).backward()
    follow(t.teacher, t.model)
    return loss


@torch.no_grad()
def follow(teacher: nn.Module, model: nn.Module) -> None:
    """Move the average towards the model."""
    students = dict(model.named_parameters())
    for name, mean in teacher.named_parameters():
        mean.lerp_(students[name], 0.3)


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "two forwards": two_forwards,
    "evaluation before backward": evaluation_before_backward,
    "two backwards": two_backwards,
    "backward twice": backward_twice,
    "gradient penalty": gradient_penalty,
    "penalised parameter gradients": penalised_parameter_gradients,
    "gradients by autograd.grad": gradients_by_autograd_grad,
    "input gradients": input_gradients,
    "averaged teacher": averaged_teacher,
}
