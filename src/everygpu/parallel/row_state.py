"""State with an entry per row that a module keeps from one forward to the next, as a carried hidden state."""

import functools
import logging
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

NUM_LOOKS = 3
"""Forwards that are looked at: walking the modules costs more than the rest of a small one."""

logger = logging.getLogger("everygpu")

State = Mapping[str, Tensor]


def tensor_attributes(module: nn.Module) -> State:
    """Return the tensors that modules have as plain attributes, by their names."""
    named = [(f"{name}.{k}".lstrip("."), v) for name, m in module.named_modules() for k, v in vars(m).items()]
    return {name: value for name, value in named if type(value) is Tensor}


def warn_of_row_state(before: State, modules: Sequence[nn.Module], rows: Sequence[int]) -> None:
    """Warn of an attribute that each replica has set to a tensor of its rows.

    Args:
        before: The second replica's before forward.
        modules: The replicas.
        rows: Of each.
    """
    first, second = tensor_attributes(modules[0]), tensor_attributes(modules[1])
    for name, value in second.items():
        mine = first.get(name)
        if value is not before.get(name) and mine is not None and mine.ndim == value.ndim and rows[0] > 1:
            dims = [d for d, (a, b) in enumerate(zip(mine.shape, value.shape)) if (a, b) == (rows[0], rows[1])]
            others = [d for d, (a, b) in enumerate(zip(mine.shape, value.shape)) if a != b and d not in dims]
            if dims and not others:
                _say(name)


@functools.cache
def _say(name: str) -> None:
    logger.warning(
        "DataParallel: forward sets %s to a tensor with its rows. The module keeps those of the first replica, which "
        "the next forward gives to all. Have forward take and return such state. This is said once.",
        name,
    )
