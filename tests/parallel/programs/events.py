"""What happens between steps, and between backward and the update."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_leaves

from tests.parallel.programs.blocks import WIDTH, Tempered
from tests.parallel.programs.network import Answer
from tests.parallel.programs.training import Training, make_batch

Event = Callable[[Training, int], None]


def trained_parameters(t: Training) -> list[nn.Parameter]:
    return [p for p in t.model.parameters() if p.requires_grad]


def freeze(t: Training, step: int) -> None:
    """Freeze the first parameters for two steps."""
    first = list(t.model.parameters())[:2]
    if step in (1, 3):
        for p in first:
            p.requires_grad_(step == 3)


def add_block(t: Training, step: int) -> None:
    if step == 2 and t.program.kind == "classifier":
        extra = nn.Linear(WIDTH, WIDTH).to(t.device, t.program.dtype)
        t.model.add_module("extra", extra)
        t.optimizers[0].add_param_group({"params": list(extra.parameters())})


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


def put_back(t: Training, step: int) -> None:
    """Spoil the weights, and load those of before."""
    if step == 3:
        state = {name: value.clone() for name, value in t.model.state_dict().items()}
        with torch.no_grad():
            for p in t.model.parameters():
                p.mul_(0.5)
        t.watch(sorted(state))
        t.model.load_state_dict(state)


def schedule_attributes(t: Training, step: int) -> None:
    for module in t.model.modules():
        if isinstance(module, Tempered):
            module.temperature = 1.0 + step
            module.mode = "product" if step % 3 == 1 else "sum"
            module.gains[0] = 0.9**step
            if step == 2:
                module.gains.append(0.7)


def hook_tensors(t: Training, step: int) -> None:
    """Clamp whole gradients: of parts of them it would give something else."""
    if step == 1:
        t.hooks += [p.register_hook(lambda g: g.clamp(-0.02, 0.02)) for p in trained_parameters(t)[-2:]]
    if step == 4:
        remove_hooks(t)


def hook_accumulation(t: Training, step: int) -> None:
    """Change gradients when they are there."""
    if step == 1:
        t.hooks += [p.register_post_accumulate_grad_hook(halve_grad) for p in trained_parameters(t)[:2]]


def halve_grad(p: Tensor) -> None:
    p.grad.mul_(0.5)


def hook_forwards(t: Training, step: int) -> None:
    linear = [module for module in t.model.modules() if type(module) is nn.Linear]
    if step == 1:
        t.hooks.append(linear[-1].register_forward_hook(lambda module, args, out: out * 0.5 + module.bias.sum()))
    if step == 3:
        remove_hooks(t)


def remove_hooks(t: Training) -> None:
    while t.hooks:
        t.hooks.pop().remove()


def hook_backwards(t: Training, step: int) -> None:
    if step == 1:
        t.hooks.append(t.model.head.register_full_backward_hook(halve_input_grads))
    if step == 4:
        remove_hooks(t)


def halve_input_grads(module: nn.Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if g is None else g / 2 for g in grad_input)


def flatten_weights(t: Training, step: int) -> None:
    """Have all parameters share one storage, as natural-gradient code and model merging do."""
    if step in (1, 2):
        vector = parameters_to_vector(t.model.parameters())
        vector_to_parameters(vector * 0.9, t.model.parameters())


def copy_model(t: Training, step: int) -> None:
    """Go on with a copy."""
    if step == 2:
        t.model = copy.deepcopy(t.model)
        t.make_optimizers()


def replace_head(t: Training, step: int) -> None:
    """Put another layer in the head's place, as fine-tuning does."""
    if step == 2:
        old = t.model.head
        t.model.head = nn.Linear(old.in_features, old.out_features).to(t.device, t.program.dtype)
        t.optimizers[-1].add_param_group({"params": list(t.model.head.parameters())})


def edit_weights(t: Training, step: int) -> None:
    """Write parameters as constraints and averages do: in place, through ``.data``, and by other memory."""
    first, *_, last = t.model.parameters()
    with torch.no_grad():
        first.clamp_(-1, 1)
    last.data.mul_(0.9)
    if step == 2:
        first.data = first.data + 0.01


BEFORE: dict[str, Event] = {
    "frozen midway": freeze,
    "block added midway": add_block,
    "resumed midway": resume,
    "state dict put back": put_back,
    "attributes scheduled": schedule_attributes,
    "tensor hooks": hook_tensors,
    "accumulation hooks": hook_accumulation,
    "forward hooks": hook_forwards,
    "backward hooks": hook_backwards,
    "weights edited": edit_weights,
    "weights in one vector": flatten_weights,
    "copied midway": copy_model,
    "head replaced midway": replace_head,
}
"""Before a step."""


def clip(t: Training, step: int) -> None:
    t.watch(torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1))


def read_grads(t: Training, step: int) -> None:
    for p in t.model.parameters():
        t.watch(None if p.grad is None else p.grad)


def change_grads(t: Training, step: int) -> None:
    for p in t.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.8).add_(0.001)


def replace_grads(t: Training, step: int) -> None:
    """Put other tensors in place of gradients, which ``zero_grad(set_to_none=False)`` writes then."""
    for p in t.model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


AFTER_BACKWARD: dict[str, Event] = {
    "clipped gradients": clip,
    "gradients read": read_grads,
    "gradients changed": change_grads,
    "gradients replaced": replace_grads,
}


def step_schedulers(t: Training, step: int) -> None:
    for scheduler in t.schedulers:
        scheduler.step()


def evaluate(t: Training, step: int) -> None:
    with t.evaluation():
        show(t, t.model, step)


def evaluate_copy(t: Training, step: int) -> None:
    if step % 2:
        clone = copy.deepcopy(t.model).eval()
        with torch.no_grad(), t.cast():
            show(t, clone, step)


def evaluate_swapped(t: Training, step: int) -> None:
    """Evaluate with weights that are put in place of the model's for a while."""
    kept = [p.data for p in t.model.parameters()]
    for p in t.model.parameters():
        p.data = p.data * 0.5
    evaluate(t, step)
    for p, data in zip(t.model.parameters(), kept):
        p.data = data


def average(t: Training, step: int) -> None:
    """Average the last weights by torch's own tool, and evaluate with them."""
    if step == 3:
        t.average = torch.optim.swa_utils.AveragedModel(t.model)
    if step >= 3 and t.average is not None and not hasattr(t.model, "extra"):
        t.average.update_parameters(t.model)
        with torch.no_grad(), t.cast():
            show(t, t.average.module.eval(), step)


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


AFTER_STEP: dict[str, Event] = {
    "scheduled rate": step_schedulers,
    "evaluated": evaluate,
    "copy evaluated": evaluate_copy,
    "swapped weights evaluated": evaluate_swapped,
    "averaged by swa_utils": average,
}
