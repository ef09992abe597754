"""Find a benchmark's model by name, check it, and shape its batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from everygpu import tree
from everygpu.bench.workloads import MODELS
from everygpu.errors import OptionError, SplitError
from everygpu.feed.tune import resize
from everygpu.named import find_function
from everygpu.parallel.scatter.row_count import find_rows
from everygpu.step.loss import as_batch, loss_in


@dataclass(frozen=True, slots=True)
class Batches:
    """Mark several batches that training steps cycle through, in their order; a plain list is one batch.

    ::

        from everygpu.bench import Batches

        def bench():
            return model, loss, optimizer, Batches(list(itertools.islice(loader, 40)))

    Args:
        items: Each as ``Training.batch`` says; their shapes and numbers of rows may differ.
    """

    items: Sequence[Any]


def list_batches(batch: Any) -> list[Any]:
    """Return all batches: those of ``Batches``, or the only one."""
    return list(batch.items) if isinstance(batch, Batches) else [batch]


class Training(NamedTuple):
    """The result of the function behind ``--model``; any tuple of the four will do."""

    model: nn.Module
    loss: Callable[..., Tensor] | None
    """Called as ``loss(output, *targets)``; None when the model returns its loss: as a number, ``["loss"]`` or
    ``.loss``."""
    optimizer: Optimizer
    """Over the model's parameters."""
    batch: Any
    """What one GPU trains on, as a DataLoader gives it: a tuple or list is the model's input, then the targets;
    anything else is the input alone. An input that is a dict becomes keyword arguments. Rows are on axis 0.
    ``Batches`` of them: steps cycle through these."""


def find_training(name: str) -> Training:
    """Call the function that makes a model with everything to train it.

    Raises:
        OptionError: there is no such file, module or function, or what it returns is no ``Training``.
        Exception: what the module or the function raises by itself.
    """
    make = find_function(MODELS.get(name, name))
    try:
        made = make()
    except SystemExit as stop:
        raise OptionError(f"{name} exits with {stop.code!r}. It may read no arguments: write parse_args([]).") from stop
    return _check(made, f"{name}()")


def _check(made: Any, what: str) -> Training:
    if not isinstance(made, tuple) or len(made) != len(Training._fields):
        found = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__qualname__}"
        raise OptionError(f"{what} returns {found}. Return (model, loss, optimizer, batch).")
    training = Training(*made)
    if not isinstance(training.model, nn.Module):
        raise OptionError(f"{what} returns a {type(training.model).__qualname__} first. Return a torch.nn.Module.")
    if not (training.loss is None or callable(training.loss)):
        raise OptionError(f"{what} returns a {type(training.loss).__qualname__} second. Return a loss, or None.")
    if not isinstance(training.optimizer, Optimizer):
        raise OptionError(f"{what} returns a {type(training.optimizer).__qualname__} third. Return an optimizer.")
    optimized = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    if optimized.isdisjoint(id(p) for p in training.model.parameters()):
        raise OptionError(f"{what} returns an optimizer over other parameters. Give it the model's.")
    batches = list_batches(training.batch)
    try:
        has_rows = [bool(find_rows([("batch", batch)], 0)) for batch in batches]
    except SplitError as error:
        raise OptionError(f"{what} returns a batch without rows on axis 0. {error}") from error
    if not batches or not all(has_rows):
        raise OptionError(f"{what} returns a batch without rows. Return for instance next(iter(loader)).")
    return training


def count_rows(batch: Any) -> int:
    """Return the number of rows of a checked batch."""
    return find_rows([("batch", batch)], 0) or 0


def repeat_rows(batch: Any, times: int) -> Any:
    """Make the batch of several devices of one device's."""
    return batch if times == 1 else resize(batch, times * count_rows(batch), 0)


def split_batch(batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """Take a batch apart into the model's input and the targets."""
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return batch[0], tuple(batch[1:])
    return batch, ()


def compute_loss(net: Callable[..., Any], loss: Callable[..., Tensor] | None, batch: Any) -> Tensor:
    """Run a model and its loss as ``TrainStep`` does, for those that know nothing of it."""
    inputs, targets = split_batch(batch)
    args, kwargs, left = as_batch(inputs, targets, {}, with_loss=loss is not None)
    output = net(*args, **kwargs)
    found: Tensor = loss_in(output).mean() if loss is None else loss(output, *left)  # nn.DataParallel's are several
    return found


def move_batch(batch: Any, device: Any) -> Any:
    """Put the tensors of a batch on a device."""
    return tree.map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
