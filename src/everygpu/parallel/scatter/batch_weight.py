"""The weight of a batch, or of a share: what the user's ``weight=`` counts, what a loss has divided by, or rows."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu import comm, tree
from everygpu.errors import OptionError
from everygpu.parallel.call import Call
from everygpu.parallel.scatter.denominator import IGNORED, LabelCheck, are_classes, count_kept, denominator_of
from everygpu.parallel.scatter.row_count import find_rows, name_arguments
from everygpu.parallel.sharded.layout import DeviceWeights, RowWeights

Weight = Callable[..., float | Tensor]


def weight_batch(
    weight: Weight | None,
    caller: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: Sequence[Any] = (),
    *,
    loss: Any = None,
    dim: int,
    num_devices: int,
    output: Any = None,
    check: "LabelCheck | None" = None,
) -> float | Tensor:
    """Return how much a batch counts, a number or a tensor of shape ().

    As ``weight`` says, called with the arguments, the targets after those by position. Left out, by the targets that
    torch's ``CrossEntropyLoss`` and ``NLLLoss`` average over, or by what the only loss in ``output`` was seen to be the
    mean of; else by rows; ``check`` warns if labels say otherwise.
    """
    if weight is not None:
        try:
            found = weight(*args, *targets, **kwargs)
        except TypeError:
            _check_takes(weight, caller, (*args, *targets), kwargs)
            raise
        return _number(found, caller)
    counted = _count_targets(loss, targets)
    if counted is None and output is not None:
        results = [x for _, x in tree.leaves(output, "") if isinstance(x, Tensor)]
        seen = [x for x in map(denominator_of, results) if x is not None]
        counted = seen[0] if len(seen) == 1 else None
        if counted is None and check is not None and check.is_due():
            check.look([(args, kwargs, targets)], [results])()
    if counted is not None:
        return counted
    rows = find_rows(name_arguments(args, kwargs), dim, num_devices)
    return 1.0 if rows is None else float(rows)


def weight_shares(call: Call, weight: Weight, home: torch.device) -> None:
    """Note how much a call's shares count by ``weight``."""
    if not isinstance(call.weights, RowWeights):
        return
    numbers = [
        weight_batch(weight, "DataParallel", args, kwargs, dim=0, num_devices=1)
        for args, kwargs in zip(call.args, call.kwargs)
    ]
    if any(isinstance(x, Tensor) for x in numbers):
        call.weights = _on_device(
            [x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64, device=home) for x in numbers], home
        )
    else:
        call.weights = tuple(map(float, numbers))


def weight_results(call: Call, results: Sequence[Tensor], home: torch.device) -> Sequence[float] | None:
    """Return how much the result of each replica counts: by what it was seen to be the mean of, or else as its call."""
    if not isinstance(call.weights, RowWeights):
        return call.weights
    counted = list(map(denominator_of, results))
    weights: DeviceWeights | RowWeights
    if all(x is not None for x in counted):
        if call.label_check is not None:
            call.label_check.note(results)
        weights = _on_device([x for x in counted if x is not None], home, call.weights)
    else:
        weights = RowWeights(call.weights)
        if call.label_check is not None:
            weights.on_mean = call.label_check.look(
                list(zip(call.args, call.kwargs)), [[x] for x in results], call.weights
            )
    weights.on_mixed = None if call.label_check is None else call.label_check.warn_of_mixed
    return weights


def _on_device(numbers: Sequence[Tensor], home: torch.device, rows: tuple[int, ...] = ()) -> DeviceWeights:
    return DeviceWeights(torch.stack([comm.copy(x.to(torch.float64), home) for x in numbers]), rows)


def _count_targets(loss: Any, targets: Sequence[Any]) -> Tensor | None:
    """Count the targets that torch's own losses average over."""
    ignored, classes = IGNORED, None
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss) and loss.reduction == "mean":
        ignored, classes = loss.ignore_index, loss.weight
    elif loss not in (F.cross_entropy, F.nll_loss):
        return None
    if len(targets) != 1 or not are_classes(targets[0]):
        return None
    target = targets[0] if classes is None else comm.copy(targets[0], classes.device)
    return count_kept(target, ignored, classes)


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
