"""The checkpoints of one run: saved at an interval, rotated, and found again."""

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from everygpu.checkpoint.background import Background, Check
from everygpu.checkpoint.directory import as_path
from everygpu.checkpoint.earlier_run import EarlierRun
from everygpu.checkpoint.kept_metrics import KeptMetrics
from everygpu.checkpoint.load import load
from everygpu.checkpoint.manager_arguments import require_mode, require_modes, require_positive, require_step, take_step
from everygpu.checkpoint.manifest import MODEL_TENSORS
from everygpu.checkpoint.nonfinite import find_nonfinite, warn_of_nonfinite
from everygpu.checkpoint.one_writer import one_writer
from everygpu.checkpoint.run_directory import (
    Mode,
    Verdicts,
    find_best,
    list_saved,
    next_place,
    rotate,
    sole_saver,
    step_path,
)
from everygpu.checkpoint.save import Taken, collect_states, wait_for_devices, with_generators, write_checkpoint
from everygpu.checkpoint.snapshot import Copying, Snapshot, SnapshotMemory
from everygpu.checkpoint.states import require_names
from everygpu.checkpoint.stop_point import StopPoint
from everygpu.errors import CheckpointError
from everygpu.ranks.group import joined

logger = logging.getLogger("everygpu")


class CheckpointManager:
    """Saves a run's checkpoints to one directory, keeps the newest and the best, and loads them again.

    ::

        with everygpu.CheckpointManager("runs/digits", keep=3, every=500) as checkpoints:
            state = {"model": model, "optimizer": optimizer, "data": data}
            done = checkpoints.load(**state, rng=True)["step"] if checkpoints.latest() else 0
            for step, (x, y) in enumerate(data, done + 1):
                train(x, y)
                checkpoints.save(step, **state)  # writes at every 500th step

    Under torchrun rank 0 writes what it has, and the others wait: in `save` until it is written, or, with
    ``asynchronous=True``, copied; in `load`, `latest`, `best`, `wait` and `close` until it is written. What fails is
    raised on all. Where only rank 0 saves, as under ``if everygpu.is_main()``, nothing waits. All ranks load the same
    files: the directory must be one that all boxes see.

    SIGTERM and SIGUSR1 end a run, in the ``with`` block or after the first save, at the next `save`: it is written
    whatever ``every`` says, and the exit code is 143. A second signal ends the process at once.

    A run that has not loaded, and begins at a step that is not above all in the directory, leaves an earlier run there
    whole: its checkpoints are moved to a subfolder ``before-*`` as the first one takes its place, with a warning.

    Not safe for several threads. Several processes that save to one directory exclude each other. Ctrl-C may come at
    any moment: a checkpoint is whole or not there, and the next save works. The interpreter's end waits for
    background saves.

    Raises:
        OptionError: an option is outside what it may be.
    Source:
        ``torch.save`` into numbered files; here each checkpoint is a directory that is complete before it gets its
        name, and the rotation never removes the last whole one.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        every: int = 1,
        keep_best: Mapping[str, Mode] | None = None,
        asynchronous: bool = False,
        signals: Collection[int] | None = None,
    ) -> None:
        """Say where and how checkpoints are kept; nothing is read or written yet.

        Args:
            directory: Of this run alone; made at the first save.
            keep: How many of the newest whole checkpoints stay, 1 or more; and the newest finite one.
            every: `save` does its work at steps that are multiples of it.
            keep_best: Metrics whose best checkpoint stays too, each with ``"min"`` or ``"max"``, for
                instance ``{"accuracy": "max"}``.
            asynchronous: Whether `save` copies the state to host memory and writes it in a thread, while
                training goes on. The memory, one copy of the state, is kept until `close`.
            signals: Which of SIGTERM and SIGUSR1 end the run at a save, by default both; ``()`` for none.
        Raises:
            OptionError: an option is outside what it may be.
        """
        # The program may change its working directory, also while it saves.
        self._name = as_path(directory, "CheckpointManager")
        self.directory = self._name.absolute()
        self.keep = require_positive("keep", keep)
        self.every = require_positive("every", every)
        self.keep_best = require_modes(keep_best)
        self.asynchronous = asynchronous
        self._stop = StopPoint(str(self._name), signals)
        self._background = Background()
        self._verdicts = Verdicts()
        self._metrics = KeptMetrics(self.keep_best, self.directory)
        self._earlier_run = EarlierRun(self.directory)
        self._written_by_rank_0: str | None = None
        # The memory of the last snapshot that was written. While one is made or written, its memory is not here: an
        # interrupt may come at any moment, and what it leaves behind must not be overwritten.
        self._spare: list[SnapshotMemory] = []

    def save(
        self,
        step: int | None = None,
        /,
        *misplaced: NoReturn,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
        **what: Any,
    ) -> Path | None:
        """Save a checkpoint, then remove those that need not be kept.

        Args:
            step: Counts what the caller likes, batches or epochs; 0 or more. Saved as an extra: `load`
                returns it. May be passed as ``step=``, too; so a `TrainStep` needs another name, as ``train_step=``.
            metrics: Numbers to choose the best checkpoint by. Those that are not finite are left out.
            force: Save at a step that is no multiple of ``every`` too.
            **what: As `everygpu.save` takes it.
        Returns:
            The checkpoint's path; None if nothing was due. With ``asynchronous=True`` it is there when
            `wait` returns.
        Raises:
            CheckpointError: as `everygpu.save` raises it, here or in the background since the last call.
            OptionError: the step is no whole number from 0 on, a metric no number, or none of them in ``keep_best``.
            SystemExit: with 143, once it is written, where a signal has asked for that.
        """
        require_names(misplaced, "save", "save(step, model=model)")
        if joined() is None:  # else errors are raised at steps at which all ranks do
            self._background.check()
        step = take_step(step, what)
        self._stop.listen(self)
        is_last = self._stop.is_here()
        if step % self.every != 0 and not force and not is_last:
            return None
        self._written_by_rank_0 = None
        ranks = one_writer()
        name = f"save step {step} to {self._name}"
        begun, written = ranks.next_key(name), ranks.next_key(f"{name} in the background")
        ranks.write(begun, lambda: self._save(step, metrics, what, written))
        self._written_by_rank_0 = None if ranks.is_writing or not self.asynchronous else written
        if is_last:
            self.wait()
            self._stop.end(step_path(self.directory, step))
        return step_path(self.directory, step)

    def load(self, step: int | None = None, *misplaced: NoReturn, **what: Any) -> dict[str, Any]:
        """Load the newest checkpoint that is whole, or that of a step.

        Args:
            step: Of the checkpoint to load; by default the newest. If that is damaged, the newest whole one
                before it is taken, with a warning that names the damage.
            **what: As `everygpu.load` takes it.
        Returns:
            What `everygpu.load` returns, with the ``step`` of the checkpoint.
        Raises:
            CheckpointError: as `everygpu.load` raises it.
            OptionError: the step is no whole number from 0 on.
        """
        require_names(misplaced, "load", "load(step, model=model)")
        if step is not None:
            require_step(step, "load")
        self.wait()
        loaded = load(self.directory if step is None else step_path(self.directory, step), **what)
        self._earlier_run.is_loaded = True
        return loaded

    def latest(self) -> Path | None:
        """Return the newest checkpoint whose files are there in full size; None if there is none."""
        self._settle()
        return next((saved.path for saved in list_saved(self.directory) if saved.place), None)

    def best(self, metric: str, mode: Mode | None = None) -> Path | None:
        """Return the checkpoint whose metric is best, of equal ones the newest.

        Args:
            metric: A name that was passed to `save` in ``metrics``.
            mode: Whether ``"min"`` or ``"max"`` is best; by default as ``keep_best`` says.
        Returns:
            Its path; None if no checkpoint has the metric.
        Raises:
            OptionError: nothing says which values are better.
        """
        self._settle()
        mode = require_mode(metric, mode or self.keep_best.get(metric))
        best = find_best(list_saved(self.directory), metric, mode)
        return None if best is None else best.path

    def wait(self) -> None:
        """Wait for what is being saved in the background.

        Raises:
            CheckpointError: what went wrong there.
        """
        self._background.wait()
        self._wait_for_rank_0()

    def close(self) -> None:
        """Wait for what is being saved, and give the memory for snapshots back; the manager can be used again.

        Raises:
            CheckpointError: what went wrong in the background.
        """
        self._close(None)

    def __enter__(self) -> "CheckpointManager":
        self._stop.listen(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if isinstance(error, KeyboardInterrupt):  # the interpreter's end, and the next call, wait: a second ends it now
            return
        try:
            self.wait()
        except CheckpointError:
            if error is None:  # else the log has it, and the block's own error is the one to see
                raise
        finally:
            while self._spare:
                self._spare.pop().release()
            self._stop.leave(self, has_failed=error is not None)

    def _save(self, step: int, given: Mapping[str, Any] | None, what: dict[str, Any], written: str) -> None:
        metrics = self._metrics.take(given, is_resumed=self._earlier_run.is_loaded)
        self._background.wait()
        model, optimizer, scheduler = (what.pop(name, None) for name in ("model", "optimizer", "scheduler"))
        taking = partial(collect_states, model, optimizer, scheduler, {**what, "step": step})
        if self.asynchronous:
            memory = self._spare.pop() if self._spare else SnapshotMemory()
            snapshot = self._copy(taking, memory)
            write = partial(self._write_snapshot, snapshot, memory, step, metrics)
            self._background.start(lambda check: one_writer().write(written, partial(write, check)))
        else:
            taken = with_generators(taking())
            wait_for_devices(taken)
            self._background.run(partial(self._write, taken, step, metrics))

    def _settle(self) -> None:
        """Raise what went wrong in the background; under ranks wait for it too, so that all find the same."""
        if joined() is None:
            self._background.check()
        else:
            self.wait()

    def _wait_for_rank_0(self) -> None:
        """Wait on another rank for what rank 0 is saving in the background."""
        key, self._written_by_rank_0 = self._written_by_rank_0, None
        if key is not None:
            one_writer().wait(key)

    def _copy(self, taking: Callable[..., Taken], memory: SnapshotMemory) -> Snapshot:
        try:
            copying = Copying(memory)
            # GPUs copy the model's tensors while the optimizer's are collected, and those
            # while the random generators' long lists of numbers are.
            snapshot = copying.finish(taking(on_tensors=copying.add))
            return replace(snapshot, taken=with_generators(snapshot.taken))
        except BaseException:
            memory.wait()
            self._spare[:] = [memory]
            raise

    def _write_snapshot(
        self, snapshot: Snapshot, memory: SnapshotMemory, step: int, metrics: dict[str, float], check: Check
    ) -> None:
        try:
            snapshot.wait()
            self._write(snapshot.taken, step, metrics, check)
        finally:
            self._spare[:] = [memory]

    def _write(self, taken: Taken, step: int, metrics: dict[str, float], check: Check) -> None:
        with sole_saver(self.directory):
            path = step_path(self.directory, step)
            nonfinite = find_nonfinite(taken.tensors.get(MODEL_TENSORS, {}), check)
            warn_of_nonfinite(path, nonfinite)
            place = next_place(self.directory, step, metrics, len(nonfinite))
            make_way = partial(self._earlier_run.make_way, step)
            write_checkpoint(path, taken, place, check=check, make_way=make_way)
            self._verdicts.trust(path)
            rotate(self.directory, self.keep, self.keep_best, self._verdicts)
