"""What an engine promises, and what it is made from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from everygpu.devices.seed import RandomOf
from everygpu.parallel.call import PerReplica
from everygpu.parallel.replicas.replica_set import ReplicaLeaves, ReplicaSet
from everygpu.parallel.scatter.split import ScatterSpec

ModuleCall = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]
"""A module with its positional and keyword arguments."""


class Wrapper(Protocol):
    """What an engine knows of the ``DataParallel`` that has it, to which it holds a weak reference only."""

    module: nn.Module
    replica_devices: tuple[torch.device, ...]
    bucket_cap_mb: float | None

    replicas_per_device: int

    @property
    def rank_model(self) -> Any: ...

    @property
    def _route(self) -> ScatterSpec: ...

    @property
    def _capture_options(self) -> tuple[Any, ...]: ...

    def _run_replicas(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], *, replicas: ReplicaSet | None = None
    ) -> PerReplica: ...

    def _random_for(self, devices: Sequence[torch.device], positions: Sequence[int]) -> Any: ...

    def _drawing_by(self, random_of: RandomOf) -> AbstractContextManager[None]: ...

    def make_replicas(
        self, make_leaves: Callable[[], ReplicaLeaves] | None = None, *, fixed: bool = False
    ) -> ReplicaSet: ...


class Engine(ABC):
    """Runs the replicas of a forward. An engine inherits from this what is the same for most.

    A new one is a module in this folder and a line in ``table``.
    """

    compiles: bool = False
    """Whether it runs compiled counterparts of the replicas."""
    replays: bool = False
    """Whether calls go through ``replay`` and replicas even on one device."""

    @property
    @abstractmethod
    def in_use(self) -> str:
        """The name of the engine that runs now: this one's, or that of another which it leaves forwards to."""

    def stop_capturing(self, reason: str) -> None:
        """Note that the caller also makes no captures, and why."""
        return

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PerReplica | None:
        """Run a whole call in the engine's own way; None to have it scattered and run by ``run``."""
        return None

    @abstractmethod
    def run(
        self, calls: Sequence[ModuleCall], devices: Sequence[torch.device], positions: Sequence[int] | None = None
    ) -> list[Any]:
        """Make one call per replica, wait for all of them, and return what each returned.

        Raises what a replica raised; its ``__cause__`` names the replica, by ``positions``, counted from 0 if left out.
        """

    def run_alone(self, call: ModuleCall, device: torch.device) -> Any:
        """Make the call of the only device, with the module itself."""
        (output,) = self.run([call], [device])
        return output

    def watch(self, outputs: list[Any]) -> list[Any]:
        """Note what the replicas returned from ``run``, and return it."""
        return outputs

    @abstractmethod
    def close(self) -> None:
        """End the threads, and whatever else the engine keeps running."""


def may_replay() -> bool:
    """Whether a call may be replayed as a whole: one with gradients, that torch.compile doesn't trace."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()
