"""How much a batch, or a share of one, counts beside others: what the user counts, or what is known, or rows."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, index
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu import comm
from everygpu.errors import OptionError
from everygpu.keys import unwrap
from everygpu.parallel.call import Call
from everygpu.parallel.scatter.row_count import find_rows, name_arguments
from everygpu.parallel.sharded.layout import DeviceWeights

Weight = Callable[..., float | Tensor]

_IGNORED = -100
"""Torch's own ``ignore_index``."""
_LOSSES = re.compile(r"self\.loss_function\(|cross_entropy|CrossEntropyLoss|nll_loss|NLLLoss")
_OF_SEQUENCES = re.compile(r"(?i)(ctc|rnnt|tdt)_?loss")
_SHIFTS = re.compile(r"\blabels\[(?:\.\.\.|:), ?1:")
_IGNORE_INDEX = re.compile(r"\bignore_index ?= ?(?:self\.)?(-?\d+|(?<=self\.)[\w.]+)")


def weigh_batch(
    weight: Weight | None,
    caller: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: Sequence[Any] = (),
    *,
    module: nn.Module,
    loss: Any = None,
    dim: int,
    num_devices: int,
) -> float | Tensor:
    """Return how much a batch counts, a number or a tensor of shape ().

    As ``weight`` says, called with the arguments, the targets after those by position. Left out, the targets count that
    torch's ``CrossEntropyLoss`` and ``NLLLoss`` average over, or without a ``loss`` the ``labels`` of a model that
    returns it; else the rows.
    """
    if weight is None:
        counted = _count_labels([kwargs], module)[0] if loss is None else _count_targets(loss, targets)
        if counted is not None:
            return counted
        rows = find_rows(name_arguments(args, kwargs), dim, num_devices)
        return 1.0 if rows is None else float(rows)
    try:
        found = weight(*args, *targets, **kwargs)
    except TypeError:
        _check_takes(weight, caller, (*args, *targets), kwargs)
        raise
    return _number(found, caller)


def weigh_shares(call: Call, weight: Weight | None, module: nn.Module, home: torch.device) -> None:
    """Note how much the result of each replica of a call counts, where that isn't by its rows."""
    if call.rows is None or call.counts_alike:
        return
    found: list[Any] = (
        _count_labels(call.kwargs, module)
        if weight is None
        else [
            weigh_batch(weight, "DataParallel", args, kwargs, module=module, dim=0, num_devices=1)
            for args, kwargs in zip(call.args, call.kwargs)
        ]
    )
    numbers = [x for x in found if x is not None]
    if len(numbers) < len(found):
        return
    if any(isinstance(x, Tensor) for x in numbers):
        tensors = [x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64, device=home) for x in numbers]
        call.weights = DeviceWeights(torch.stack([comm.copy(x.to(torch.float64), home) for x in tensors]))
    else:
        call.weights = tuple(map(float, numbers))


def _count_labels(shares: Sequence[Mapping[str, Any]], module: nn.Module) -> list[Any]:
    """Count the ``labels`` that each share's loss, which the model returns, is the mean of; None where rows count."""
    labels: list[Any] = [kwargs.get("labels") for kwargs in shares]
    if not all(map(_are_classes, labels)):
        return [None] * len(labels)
    code, owner = _find_loss(module)
    return [code.count(x, owner) for x in labels]


def _find_loss(module: nn.Module) -> tuple["LossCode", nn.Module]:
    """Find the code of a model's loss, and the module that it is of: a model may hand its labels to one inside."""
    for inner in module.modules():
        kind: Any = type(inner)
        if (code := _read_loss(kind)) is not None:
            return code, inner
        if hasattr(kind, "active_peft_config") and _has_prompt(inner):  # whose last token predicts the first label
            return LossCode(), inner
    return LossCode(is_shifted="CausalLM" in type(unwrap(module)).__name__), module


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCode:
    """What the code of a class says of the loss that its forward computes of ``labels``."""

    is_shifted: bool = False
    """Whether the first label of each row is left out, which nothing predicts."""
    is_function: bool = False
    """Whether the name of the module's ``loss_function`` says more, as in most models of ``transformers``."""
    is_of_sequences: bool = False
    """Whether it is a mean over rows, as of ``ctc_loss``."""
    ignored: int | str = _IGNORED
    """What ``ignore_index`` is, or the name of the attribute that says it."""

    def count(self, labels: Tensor, module: nn.Module) -> Tensor | None:
        """Count the labels that the loss is the mean of; None where rows count."""
        name = getattr(getattr(module, "loss_function", None), "__name__", "") if self.is_function else ""
        if self.is_of_sequences or _OF_SEQUENCES.search(name):
            return None
        ignored = self.ignored
        if isinstance(ignored, str):
            try:
                ignored = index(attrgetter(ignored)(module))
            except (AttributeError, TypeError):  # of a line that doesn't run
                ignored = _IGNORED
        is_shifted = labels.ndim > 1 and (self.is_shifted or "CausalLM" in name)
        return torch.ne(labels[:, 1:] if is_shifted else labels, ignored).sum()


@functools.lru_cache(maxsize=1024)
def _read_loss(kind: Any) -> LossCode | None:
    """Read the code of a class; None where its forward takes no labels, computes no loss, or has no known code."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    try:
        code = _source(owner) if "labels" in inspect.signature(kind.forward).parameters else ""
    except (OSError, TypeError, ValueError):  # typed into a prompt, or compiled
        return None
    is_of_sequences = _OF_SEQUENCES.search(code) is not None
    if not is_of_sequences and _LOSSES.search(code) is None:
        return None
    given = found[1] if (found := _IGNORE_INDEX.search(code)) else str(_IGNORED)
    return LossCode(
        is_shifted=_SHIFTS.search(code) is not None,
        is_function="self.loss_function(" in code and "shift_labels=" not in code,  # it leaves those as they are
        is_of_sequences=is_of_sequences,
        ignored=int(given) if given.lstrip("-").isdigit() else given,
    )


def _has_prompt(module: Any) -> bool:
    """Tell whether peft puts a trained prompt before each row."""
    config = module.active_peft_config
    return bool(config.is_prompt_learning) and "PREFIX" not in str(config.peft_type)


def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # in a notebook only its functions are found
        return "".join(map(inspect.getsource, filter(inspect.isfunction, vars(kind).values())))


def _count_targets(loss: Any, targets: Sequence[Any]) -> Tensor | None:
    """Count the targets that the mean of torch's own losses is of, by their classes' weights."""
    ignored, classes = _IGNORED, None
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss) and loss.reduction == "mean":
        ignored, classes = loss.ignore_index, loss.weight
    elif loss not in (F.cross_entropy, F.nll_loss):
        return None
    if len(targets) != 1 or not _are_classes(targets[0]):
        return None
    target = targets[0] if classes is None else comm.copy(targets[0], classes.device)
    is_counted: Tensor = torch.ne(target, ignored)
    if classes is None:
        return is_counted.sum()
    return torch.where(is_counted, classes[torch.where(is_counted, target, 0)], 0).sum()


def _are_classes(x: Any) -> bool:
    return isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.is_nested)


def _check_takes(weight: Weight, caller: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a function of other arguments; a TypeError from within one that takes them is its own."""
    try:
        signature = inspect.signature(weight)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as cause:
        kinds = [type(value).__qualname__ for value in args]
        call = ", ".join(kinds + [f"{name}={type(value).__qualname__}" for name, value in kwargs.items()])
        raise OptionError(
            f"{caller}: weight must take each input and each target of a batch as an argument, here weight({call}), "
            f"got {signature}: {cause}. For inputs x and mask and a target y write e.g. lambda x, mask, y: mask.sum()."
        ) from cause


def _number(found: Any, caller: str) -> float | Tensor:
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.detach().reshape(())
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as cause:
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__qualname__
        raise OptionError(
            f"{caller}: weight must return how much the batch counts, one number, got {kind}. Return e.g. a sum."
        ) from cause
