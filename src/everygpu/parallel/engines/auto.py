"""The default engine on several GPUs: threads at first, then recordings where they are proven."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from everygpu.parallel.engines.engine import Call, Engine, EngineContext, Outputs
from everygpu.parallel.engines.graphs import RecordedReplicas
from everygpu.parallel.engines.threads import Workers

logger = logging.getLogger("everygpu")


class AutoReplicas(Engine):
    """Runs replicas in threads until a recording serves, so that the first step waits for nothing.

    Forwards on batches of one shape are recorded as CUDA graphs where Dynamo proves that they read nothing unguarded
    and change nothing but tensors. Else replicas stay in threads, and one line at WARNING says why.

    Args:
        context: What the engines are made from.
    """

    def __init__(self, context: EngineContext) -> None:
        self._threads = Workers(len(context.devices) - 1)
        self._recorded: RecordedReplicas | None = RecordedReplicas(context, self._threads, proves=True)

    @property
    def in_use(self) -> str:
        return "threads" if self._recorded is None else self._recorded.in_use

    def launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs | None:
        """Launch a recording; None where none serves."""
        if self._recorded is None:
            return None
        outputs = self._recorded.launch(args, kwargs)
        if outputs is None and self._recorded.reason is not None:
            self.give_up_recording(self._recorded.reason)
        return outputs

    def run(
        self, calls: Sequence[Call], devices: Sequence[torch.device], positions: Sequence[int] | None = None
    ) -> list[Any]:
        """Make the calls in threads, also while they are recorded."""
        try:
            return self._threads.run(calls, devices, positions)
        except torch.OutOfMemoryError:
            # Recordings hold the memory of a step each; they can be made again.
            if self._recorded is None or not self._recorded.forget():
                raise
        return self._threads.run(calls, devices, positions)

    def watch(self, outputs: list[Any]) -> None:
        """Note which outputs the loss is computed from."""
        if self._recorded is not None:
            self._recorded.watch(outputs)

    def give_up_recording(self, reason: str) -> None:
        """Run in threads for good, and say so.

        Args:
            reason: Why.
        """
        if self._recorded is None:
            return
        self._recorded = None
        logger.warning(
            "DataParallel: replicas run in threads, slower than a process a GPU. Not recorded: %s. Change that, or "
            "start the script by everygpu run --processes auto; in a notebook, by everygpu.launch.",
            reason,
        )

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
