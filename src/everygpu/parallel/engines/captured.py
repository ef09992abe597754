"""Replay captured forwards; what isn't captured runs by another engine."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from everygpu.devices.p2p import reach_each_other
from everygpu.parallel.call import PerReplica
from everygpu.parallel.cuda_graphs.captured_forward import CapturedForward
from everygpu.parallel.engines.engine import Engine, ModuleCall, Wrapper, may_replay
from everygpu.torch_private.compiler import not_compiled

T = TypeVar("T")

logger = logging.getLogger("everygpu")


class CapturedReplicas(Engine):
    """Replays captured forwards, on GPUs that reach each other's memory; ``eager`` runs what isn't captured.

    With ``proves`` only forwards are captured for which Dynamo proves that a capture does the same, and only while most
    batches have one of a few shapes; else it stops capturing, with one log line that says why.
    """

    replays = True

    def __init__(self, wrapper: Wrapper, eager: Engine, *, proves: bool = False) -> None:
        self.captured_forward: CapturedForward | None = None
        self.compiles = eager.compiles
        self._proves = proves
        self._wrapper = wrapper
        self._eager = eager
        # Looked at in the first forward: finding out may take a test of the links between GPUs.
        self._has_looked = False

    @not_compiled
    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PerReplica | None:
        """Replay a capture; None where none serves."""
        if not self._has_looked:
            self._has_looked = True
            self._look()
        outputs = None if self.captured_forward is None else self.captured_forward.replay(args, kwargs)
        if self._proves and self.captured_forward is not None and self.captured_forward.capture.reason is not None:
            self.stop_capturing(self.captured_forward.capture.reason)
        return outputs

    @property
    def in_use(self) -> str:
        was_replayed = self.captured_forward is not None and self.captured_forward.was_replayed
        return "capture" if was_replayed else self._eager.in_use

    def run(
        self, calls: Sequence[ModuleCall], devices: Sequence[torch.device], positions: Sequence[int] | None = None
    ) -> list[Any]:
        """Make the calls by the other engine."""
        return self._with_memory(lambda: self._eager.run(calls, devices, positions))

    def run_alone(self, call: ModuleCall, device: torch.device) -> Any:
        """Make the call by the other engine; compiled code is warmed up for the capture."""
        if not may_replay():
            return self._eager.run_alone(call, device)
        run = super().run_alone if self.compiles and self.replays else self._eager.run_alone
        return self._with_memory(lambda: run(call, device))

    def watch(self, outputs: list[Any]) -> list[Any]:
        """Note which outputs the loss is computed from."""
        return outputs if self.captured_forward is None else self.captured_forward.watch(outputs)

    def stop_capturing(self, reason: str) -> None:
        """Leave all forwards to the other engine, and say so where that is slower: on one device, what captures has."""
        if not self._proves or not self.replays:
            return
        self._has_looked, self.replays, self.captured_forward = True, False, None
        if len(self._wrapper.replica_devices[:: self._wrapper.replicas_per_device or 1]) > 1:
            logger.warning(
                "DataParallel: replicas run in threads, slower than one process per GPU. Not captured: %s. Change that "
                "or start the script by everygpu run --processes auto; in a notebook, by everygpu.launch.",
                reason,
            )

    def close(self) -> None:
        """End the other engine's threads."""
        self._eager.close()

    def _with_memory(self, run: Callable[[], T]) -> T:
        """Run, once more without the captures where memory doesn't suffice: each holds that of a step."""
        try:
            with nullcontext() if self.captured_forward is None else self.captured_forward.capture.running_eagerly():
                return run()
        except torch.OutOfMemoryError:
            if self.captured_forward is None or not self.captured_forward.capture.forget():
                raise
        return run()

    def _look(self) -> None:
        if reach_each_other(self._wrapper.replica_devices):
            self.captured_forward = CapturedForward(self._wrapper, proves=self._proves)
        elif self._proves:
            self.stop_capturing("captures need GPUs that reach each other's memory")
        else:
            self.replays = False
            logger.warning(
                'DataParallel: engine="capture": replicas run in threads, as captures need GPUs that reach each '
                "other's memory."
            )
