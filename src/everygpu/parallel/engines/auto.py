"""The default engine: threads at first, then the fastest that is safe for the module."""

import logging
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from everygpu.errors import WorkerError
from everygpu.parallel import switches
from everygpu.parallel.cuda_graphs.capture_lock import CAPTURE_LOCK
from everygpu.parallel.cuda_graphs.multi_gpu_graph import is_capturing
from everygpu.parallel.engines.engine import Call, Engine, EngineContext, Outputs
from everygpu.parallel.engines.graphs import RecordedReplicas
from everygpu.parallel.engines.processes.engine import ProcessReplicas
from everygpu.parallel.engines.processes.helper_process import CannotStartError
from everygpu.parallel.engines.processes.side_effects import SideEffects
from everygpu.parallel.engines.threads import Workers

logger = logging.getLogger("everygpu")

NUM_PERIODS = 20
"""Steps whose median counts; as many before them are left out, in which memory is allocated and kernels are chosen."""

NUM_WATCHED = 3
"""Forwards in which side effects are looked for."""


class Periods:
    """How long steps take by each engine, from forward to forward: no GPU is waited for."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}
        self._num_noted: dict[str, int] = {}
        self._last: tuple[str, float] | None = None

    def note(self, engine: str) -> None:
        """Note that a forward begins; those without gradients are no steps."""
        if not torch.is_grad_enabled():
            self._last = None
            return
        now = time.perf_counter()
        if self._last is not None and self._last[0] == engine:
            self._seconds.setdefault(engine, deque(maxlen=NUM_PERIODS)).append(now - self._last[1])
            self._num_noted[engine] = self._num_noted.get(engine, 0) + 1
        self._last = engine, now

    def median_ms(self, engine: str) -> float | None:
        """Return the median of the last steps, in milliseconds; None until there are enough."""
        if self._num_noted.get(engine, 0) < 2 * NUM_PERIODS:
            return None
        return statistics.median(self._seconds[engine]) * 1000


class AutoReplicas(Engine):
    """Runs replicas in threads, so that the first step waits for nothing, and looks for a faster way meanwhile.

    Forwards on batches of one shape are recorded as CUDA graphs where Dynamo proves that they read nothing unguarded
    and change nothing but tensors. Where they can't be recorded, helper processes are started in the background, if
    ``switches.TRIES_PROCESSES``, and replicas run in them once they are ready. Where there can be none either, one line
    at WARNING says why.

    Args:
        context: What the engines are made from.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._threads = Workers(len(context.devices) - 1)
        self._recorded: RecordedReplicas | None = RecordedReplicas(context, self._threads, proves=True)
        self._processes: ProcessReplicas | None = None
        self._why_not_recorded = ""
        self._effects: SideEffects | None = None
        self._num_watched = 0
        self._periods = Periods()
        self._last_used = "threads"
        self._has_told = False

    @property
    def in_use(self) -> str:
        """The name of the engine that the last forward ran by."""
        return self._last_used if self._recorded is None else self._recorded.in_use

    def launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs | None:
        """Launch a recording; None where none serves."""
        if self._recorded is None:
            return self._processes.launch(args, kwargs) if self._processes is not None and self._goes_out() else None
        outputs = self._recorded.launch(args, kwargs)
        reason = self._recorded.reason
        if outputs is None and reason is not None:
            self.give_up_recording(reason)
        return outputs

    def run(
        self, calls: Sequence[Call], devices: Sequence[torch.device], positions: Sequence[int] | None = None
    ) -> list[Any]:
        """Make the calls in helpers, if these are ready, else in threads; in threads also while they are recorded."""
        if self._processes is not None:
            if self._goes_out():
                self._periods.note("processes")
                self._last_used = "processes"
                try:
                    outputs = self._processes.run(calls, devices, positions)
                    self._last_used = self._processes.in_use
                    return outputs
                except torch.OutOfMemoryError:
                    self._leave("there is too little GPU memory for them")
            self._processes.refuse_direct()
        self._tell()
        self._periods.note("threads")
        self._last_used = "threads"
        try:
            return self._run_watched(calls, devices, positions)
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
        """Look for side effects in the next forwards, and start helper processes then: there will be no recordings.

        Args:
            reason: Why.
        """
        if self._processes is None:
            self._recorded = None
            self._why_not_recorded = reason
            self._processes = ProcessReplicas(self._context)
            self._effects = SideEffects(self._context.module())
            if not switches.TRIES_PROCESSES:
                self._processes.reason = "they are switched off: pass engine='processes' to use them"

    def close(self) -> None:
        """End threads and helpers."""
        self._threads.close()
        if self._processes is not None:
            self._processes.close()

    def _has_helpers(self) -> bool:
        """Tell, without waiting, whether replicas can run in helpers."""
        processes = self._processes
        if processes is None or processes.reason is not None or self._periods.median_ms("threads") is None:
            return False
        self._compare()
        if processes.reason is not None:
            return False
        try:
            is_ready = processes.is_ready()
        except (WorkerError, CannotStartError) as error:
            processes.reason = str(error)
            return False
        if is_ready and not self._has_told:
            self._has_told = True
            CAPTURE_LOCK.run_between(lambda: _free_idle_memory(self._context.devices))
            logger.info(
                'DataParallel: engine="auto": replicas run in processes from now on, as forward isn\'t recorded: %s.',
                self._why_not_recorded,
            )
        return is_ready

    def _run_watched(
        self, calls: Sequence[Call], devices: Sequence[torch.device], positions: Sequence[int] | None
    ) -> list[Any]:
        """Run in threads; start helpers after a few forwards that change nothing of which a helper has a copy."""
        processes, effects = self._processes, self._effects
        if processes is None or effects is None or processes.reason is not None or self._num_watched == NUM_WATCHED:
            return self._threads.run(calls, devices, positions)
        effects.begin()
        outputs = self._threads.run(calls, devices, positions)
        processes.reason = effects.end()
        self._num_watched += 1
        if processes.reason is None and self._num_watched == NUM_WATCHED:
            try:
                processes.start()
            except CannotStartError as error:
                processes.reason = str(error)
        return outputs

    def _goes_out(self) -> bool:
        """Tell whether the next forward runs in helpers."""
        return not is_capturing() and self._has_helpers()

    def _compare(self) -> None:
        """Go back to threads where these are faster: their steps take no messages."""
        before, now = self._periods.median_ms("threads"), self._periods.median_ms("processes")
        if before is not None and now is not None and before < now:
            self._leave(f"steps took {now:.1f} ms there, and {before:.1f} ms in threads")

    def _leave(self, reason: str) -> None:
        """Run in threads from now on."""
        if self._processes is not None:
            self._processes.reason = reason
            self._processes.close()

    def _tell(self) -> None:
        """Say once that replicas stay in threads."""
        if self._processes is not None and self._processes.reason is not None and not self._processes.has_told:
            self._processes.has_told = True
            logger.warning(
                "DataParallel: replicas run in threads, slower than DistributedDataParallel. Not recorded: %s. Not in "
                "processes: %s. Change what the reasons name, or pass engine='threads' to accept it.",
                self._why_not_recorded,
                self._processes.reason,
            )


def _free_idle_memory(devices: Sequence[torch.device]) -> None:
    """Free what threads have used, which would lie idle: helpers have allocators of their own."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
