"""How much a batch counts beside others: by its rows, or what the user counts."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from everygpu.errors import OptionError
from everygpu.parallel.scatter.row_count import find_rows, name_arguments

Weight = Callable[..., float | Tensor]


def weigh_batch(
    weight: Weight | None,
    caller: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: Sequence[Any] = (),
    *,
    dim: int,
    num_devices: int,
) -> float | Tensor:
    """Return how much a batch counts.

    Args:
        weight: Called with the arguments, the targets after those by position; the batch's rows when left out.
        caller: For errors.
        args, kwargs: Of the model.
        targets: Of the loss.
        dim: Where the rows are.
        num_devices: As for ``find_rows``.
    Returns:
        A number, or a tensor of shape ().
    Raises:
        OptionError: weight doesn't take these arguments, or returns no number.
    """
    if weight is None:
        rows = find_rows(name_arguments(args, kwargs), dim, num_devices)
        return 1.0 if rows is None else float(rows)
    try:
        found = weight(*args, *targets, **kwargs)
    except TypeError:
        _check_takes(weight, caller, (*args, *targets), kwargs)
        raise
    return _number(found, caller)


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
