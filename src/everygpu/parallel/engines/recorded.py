"""Launch recorded forwards; what isn't recorded runs by another engine."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from everygpu.devices.p2p import reach_each_other
from everygpu.parallel.call import PerReplica
from everygpu.parallel.cuda_graphs.recorded_forward import RecordedForward
from everygpu.parallel.engines.engine import Engine, EngineContext, ModuleCall, may_launch
from everygpu.torch_private.compiler import not_compiled

T = TypeVar("T")

logger = logging.getLogger("everygpu")


class RecordedReplicas(Engine):
    """Launches recorded forwards, on GPUs that reach each other's memory.

    Args:
        context: What the recordings are made from.
        eager: Runs what isn't recorded, and what is, while it is recorded: the first step waits for nothing.
        proves: Record only forwards of which Dynamo proves that a recording does the same, and only while most batches
            are of a few shapes; else give up, with one line that says why.
    """

    launches = True

    def __init__(self, context: EngineContext, eager: Engine, *, proves: bool = False) -> None:
        self.recorder: RecordedForward | None = None
        self.compiles = eager.compiles
        self._proves = proves
        self._context = context
        self._eager = eager
        self._was_launched = False
        # Looked at in the first forward: finding out may take a test of the links between GPUs.
        self._has_looked = False

    @not_compiled
    def launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PerReplica | None:
        """Launch a recording; None where none serves."""
        if not self._has_looked:
            self._has_looked = True
            self._look()
        outputs = None if self.recorder is None else self.recorder.run(args, kwargs)
        self._was_launched = outputs is not None
        if self._proves and self.recorder is not None and self.recorder.capture.reason is not None:
            self.stop_capturing(self.recorder.capture.reason)
        return outputs

    @property
    def in_use(self) -> str:
        return "capture" if self._was_launched else self._eager.in_use

    def run(
        self, calls: Sequence[ModuleCall], devices: Sequence[torch.device], positions: Sequence[int] | None = None
    ) -> list[Any]:
        """Make the calls by the other engine."""
        return self._with_memory(lambda: self._eager.run(calls, devices, positions))

    def run_alone(self, call: ModuleCall, device: torch.device) -> Any:
        """Make the call by the other engine; compiled code is warmed up for the recording."""
        if not may_launch():
            return self._eager.run_alone(call, device)
        run = super().run_alone if self.compiles and self.launches else self._eager.run_alone
        return self._with_memory(lambda: run(call, device))

    def watch(self, outputs: list[Any]) -> list[Any]:
        """Note which outputs the loss is computed from."""
        return outputs if self.recorder is None else self.recorder.watch(outputs)

    def stop_capturing(self, reason: str) -> None:
        """Leave all forwards to the other engine, and say so where that is slower: on one device, what records has."""
        if not self._proves or not self.launches:
            return
        self._has_looked, self.launches, self.recorder = True, False, None
        if len(self._context.devices) > 1:
            logger.warning(
                "DataParallel: replicas run in threads, slower than a process a GPU. Not recorded: %s. Change that, or "
                "start the script by everygpu run --processes auto; in a notebook, by everygpu.launch.",
                reason,
            )

    def close(self) -> None:
        """End the other engine's threads."""
        self._eager.close()

    def _with_memory(self, run: Callable[[], T]) -> T:
        """Run, once more without the recordings where memory doesn't suffice: each holds that of a step."""
        try:
            with nullcontext() if self.recorder is None else self.recorder.capture.running_eagerly():
                return run()
        except torch.OutOfMemoryError:
            if self.recorder is None or not self.recorder.capture.forget():
                raise
        return run()

    def _look(self) -> None:
        context = self._context
        if reach_each_other(context.devices):
            self.recorder = RecordedForward(context, proves=self._proves)
        elif self._proves:
            self.stop_capturing("recordings need GPUs that reach each other's memory")
        else:
            self.launches = False
            logger.warning(
                'DataParallel: engine="capture": replicas run in threads, as recordings need GPUs that reach each '
                "other's memory."
            )
