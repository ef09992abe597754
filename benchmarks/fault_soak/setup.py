"""How a training is set up, and what every way to train and save can do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.fault_soak.task import LAST_STEP, Net, Samples
from torch import Tensor

NAMES = {"everygpu": "everygpu", "torch": "torch.save", "dcp": "DCP", "lightning": "Lightning"}
LOOPS = ("plain", "TrainStep", "ShardedOptimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How one training is set up; a seed has drawn it."""

    way: str
    engine: str = ""
    loop: str = "plain"
    asynchronous: bool = False
    goes_on: bool = False
    """Whether the script catches errors, loads the newest checkpoint and goes on, or ends with them."""
    in_block: bool = False
    """Whether the manager is used in a ``with`` block."""
    num_steps: int = LAST_STEP
    """Whether the position is saved of the Feeder, or of the loader below it."""

    @property
    def name(self) -> str:
        """The name of its column."""
        return f"everygpu, {self.engine}" if self.engine else NAMES[self.way]

    @property
    def reference(self) -> tuple[str, ...]:
        """What decides the numbers."""
        return (self.way, self.engine, self.loop)


class Training(Protocol):
    """A model, its data, and checkpoints of both."""

    net: Net
    samples: Samples

    def resume(self) -> int: ...

    def batches(self) -> Iterator[Any]: ...

    def end_pass(self) -> None: ...

    def train(self, images: Any, labels: Any, on: Callable[[str], object]) -> Tensor: ...

    def evaluate(self, images: Tensor) -> Tensor: ...

    def save(self, step: int) -> bool: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]: ...


def newest_of(way: str, root: Path) -> Path | None:
    """Return the newest checkpoint that a script of this way would take."""
    if way == "torch":
        path = root / "checkpoint.pt"
        return path if path.exists() else None
    if way == "lightning":
        return max(root.glob("*.ckpt"), default=None)
    return max((path.parent for path in root.glob("*/.metadata")), default=None)
