"""Find a benchmark's model by name, check it, and resize its batch."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from everygpu import tree
from everygpu.bench.batches import Batches, list_batches
from everygpu.bench.workloads import MODELS
from everygpu.errors import OptionError, SplitError
from everygpu.feed.batch_size import resize
from everygpu.parallel.scatter.row_count import find_rows


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

    Args:
        name: One of ours, or ``"module:function"``; the function takes no arguments and returns a ``Training``.
    Raises:
        OptionError: there is no such module or function, the module exits as it is imported, the function can't be
            called, or what it returns is none.
        Exception: what the module or the function raises by itself.
    """
    function: Any = MODELS[name] if name in MODELS else _find_function(name)
    try:
        made = function()
    except SystemExit as stop:
        raise OptionError(
            f"bench: {name}() must return a tuple (model, loss, optimizer, batch), got an exit with {stop.code!r}. "
            f"It has no command line to read: write parse_args([]) in it."
        ) from stop
    return _check(made, f"bench: {name}()")


def _find_function(name: str) -> Any:
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise OptionError(
            f"bench: --model must be one of {', '.join(MODELS)}, or module:function, got {name!r}. "
            f"For a function bench() in train.py write train:bench."
        )
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports itself is not
        raise OptionError(
            f"bench: --model {name} needs a module {module_name}, got none of that name: {error}. "
            f"Run the command in the directory of the file."
        ) from error
    except SystemExit as stop:
        raise OptionError(
            f"bench: --model {name} needs a module that can be imported, got one that exits with {stop.code!r}: "
            f"it runs as a script. Put the script's part, such as parse_args() and the loop, under "
            f"if __name__ == '__main__'."
        ) from stop
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "no such name" if function is None else f"a {type(function).__qualname__}"
        raise OptionError(f"bench: --model {name} needs a function {function_name} in {module.__file__}, got {found}.")
    return function


def _check(made: Any, what: str) -> Training:
    if not isinstance(made, tuple) or len(made) != len(Training._fields):
        found = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__qualname__}"
        raise OptionError(f"{what} must return a tuple (model, loss, optimizer, batch), got {found}.")
    training = Training(*made)
    if not isinstance(training.model, nn.Module):
        raise OptionError(f"{what} must return a torch.nn.Module first, got a {type(training.model).__qualname__}.")
    if training.loss is not None and not callable(training.loss):
        raise OptionError(
            f"{what} must return as second a loss to call as loss(output, *targets), or None when the model returns "
            f"its loss, got a {type(training.loss).__qualname__}."
        )
    if not isinstance(training.optimizer, Optimizer):
        raise OptionError(
            f"{what} must return a torch.optim.Optimizer third, got a {type(training.optimizer).__qualname__}."
        )
    optimized = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    if optimized.isdisjoint(id(p) for p in training.model.parameters()):
        raise OptionError(f"{what} must return an optimizer over the model's parameters, got one over others.")
    if isinstance(training.batch, Batches) and not training.batch.items:
        raise OptionError(
            f"{what} must return one batch or more in Batches, got none. Return for instance some of a loader."
        )
    for batch in list_batches(training.batch):
        _check_batch(batch, what)
    return training


def _check_batch(batch: Any, what: str) -> None:
    try:
        num_rows = find_rows([("batch", batch)], 0)
    except SplitError as error:
        raise OptionError(f"{what} must return a batch fourth, with rows on axis 0: {error}") from error
    if not num_rows:
        raise OptionError(
            f"{what} must return a batch with rows fourth, got a {type(batch).__qualname__} without any. "
            f"Return for instance next(iter(loader)), or everygpu.bench.Batches of several."
        )


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
    """Run a model and its loss as ``TrainStep`` does, for those that know nothing of it.

    Args:
        net: The model, however it is wrapped.
        loss: As in ``Training``.
        batch: Likewise, on the device where ``net`` takes it.
    Returns:
        Shape ().
    """
    inputs, targets = split_batch(batch)
    more = targets if loss is None else ()
    if isinstance(inputs, dict) and not more:
        output = net(**inputs)
    else:
        output = net(*inputs, *more) if isinstance(inputs, tuple) else net(inputs, *more)
    if loss is not None:
        return loss(output, *targets)
    found = output if isinstance(output, Tensor) else output["loss"] if isinstance(output, dict) else output.loss
    return found.mean()  # nn.DataParallel has one number per replica


def move_batch(batch: Any, device: Any) -> Any:
    """Put the tensors of a batch on a device."""
    return tree.map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
