"""What a fused update needs to know of an optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Options = Mapping[str, Any]
"""A parameter group of the stock optimizer."""


def is_number(value: Any) -> bool:
    """Tell whether an option is a plain number: reading a tensor would wait for its device."""
    return not isinstance(value, Tensor)


def _has_plain_rate(group: Options) -> bool:
    return is_number(group["lr"])


def _always(_: Options) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """An optimizer whose step a kernel can do, element by element."""

    optimizers: tuple[type[Optimizer], ...]
    """torch's classes; a subclass of theirs may do anything, so it is another optimizer."""
    states: tuple[str, ...]
    """Names of the states with one value for each element, in the order of the kernel's table."""
    columns: tuple[str, ...]
    """What a row of hyperparameters has in it. The first is the gradient's sign."""
    make_row: Callable[[Options, int], list[float]]
    """Work a row out in double precision, from a parameter group and the number of updates so far."""
    kernel: str
    """Its module in ``kernels``."""
    is_plain: Callable[[Options], bool] = _has_plain_rate
    """Tell whether the kernel heeds all options of a parameter group."""
    keeps_states: Callable[[Options], bool] = _always
    """Tell whether a parameter group's options need the states at all."""
    counts_steps: bool = True
    """There is a state ``step``; else parameters with a state count as updated once."""
    widens_states: bool = False
    """torch's step goes on with states of a wider dtype than the parameters'; other optimizers fail."""

    def launch(self, *tables: Tensor, **numbers: Any) -> None:
        """Queue the kernel, which is imported here: Triton is not installed everywhere. See ``kernels.blocks``."""
        import_module(f"everygpu.step.kernels.{self.kernel}").run(*tables, **numbers)
