"""The checkpoints of one run: saved at an interval, rotated, and found again."""

import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from everygpu.checkpoint.background import Background, SnapshotMemory, StateSnapshot
from everygpu.checkpoint.directory import (
    LOCK,
    Mode,
    as_path,
    best_first,
    finish_interrupted_saves,
    hold_lock,
    list_saved,
    must_be_writable,
    rotate,
    step_path,
)
from everygpu.checkpoint.format import is_claimed, is_ours
from everygpu.checkpoint.load import load
from everygpu.checkpoint.save import (
    collect_state,
    is_spread,
    next_key,
    wait_for_devices,
    wait_for_main,
    write_checkpoint,
    write_once,
    write_together,
)
from everygpu.checkpoint.states import check_targets
from everygpu.checkpoint.stop import stop
from everygpu.checkpoint.values import cut
from everygpu.errors import CheckpointError, CheckpointForeignError, OptionError
from everygpu.exit_codes import STOPPED
from everygpu.ranks.group import current_group
from everygpu.ranks.membership import is_main

logger = logging.getLogger("everygpu")


class CheckpointManager:
    """Saves a run's checkpoints to one directory, keeps the newest and the best, and resumes from them.

    ::

        run = everygpu.CheckpointManager("runs/a", keep=3, best=("accuracy", "max", 3), every=500,
                                         model=model, optimizer=optimizer, data=data)
        done = run.resume()  # the step, 0 in an empty directory; random states too
        with run:
            for step, (x, y) in enumerate(data, done + 1):
                train(x, y)
                run.save(step, accuracy=0.9)  # every 500th, and the last one when the block ends

    Under torchrun rank 0 writes its state. The others wait until it is written, or with ``asynchronous=True`` until it
    is copied, and errors are raised on all ranks. If only rank 0 saves, as under ``if everygpu.is_main()``, nothing
    waits. All machines must see the directory.

    SIGTERM or SIGUSR1 on any rank, in the ``with`` block or after the first save, ends the run at the next `save`. That
    save is written whatever ``every`` says, and the exit code is 143. A second signal ends the process at once, and one
    without a later save ends it when the block ends. If your program has its own handler, that one stays.

    Use it from one thread. Several processes that save to one directory exclude each other. Ctrl-C may come at any
    moment: a checkpoint is complete or not there, and the next save works. The interpreter waits for background saves
    before it ends.

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
        best: tuple[str, Mode, int] | None = None,
        asynchronous: bool = False,
        overwrite: bool = False,
        **objects: Any,
    ) -> None:
        """Define what is saved, where, and which checkpoints are kept; nothing is read or written yet.

        Args:
            directory: The directory of this run alone; created at the first save.
            keep: How many of the newest checkpoints to keep, 1 or more.
            every: `save` writes at multiples of this.
            best: A metric, ``"min"`` or ``"max"``, and how many of the best checkpoints by it to keep as well. If two
                are equal, the earlier one is better.
            asynchronous: Whether `save` writes a copy of the state in a thread; its memory is kept until `close`.
            overwrite: Whether a run that has not resumed removes the checkpoints of an earlier run at its first save.
            **objects: What is saved and resumed, by name: ``model=``, ``optimizer=``, ``scheduler=``, ``data=``, and
                any other object with state_dict and load_state_dict, or a torch.Generator.
        Raises:
            OptionError: an option is outside what it may be.
            CheckpointContentError: an object can't be restored in place.
        """
        # The program may change its working directory, also while it saves.
        self._name = as_path(directory, "CheckpointManager")
        self.directory = self._name.absolute()
        if any(type(number) is not int or number < 1 for number in (keep, every)):
            raise OptionError(f"CheckpointManager: keep and every count from 1, got {keep!r} and {every!r}.")
        kinds = [type(one) for one in best or ()]
        if best is not None and (kinds != [str, str, int] or best[1] not in get_args(Mode) or best[2] < 1):
            got = cut(repr(best))
            raise OptionError(f"CheckpointManager: best is a metric, 'min' or 'max', and a number from 1, got {got}.")
        self.keep, self.every, self._best = keep, every, best
        self.asynchronous, self._is_clearing = asynchronous, overwrite
        self._objects = {name: value for name, value in objects.items() if value is not None}
        check_targets(self._objects, "CheckpointManager", ("keep", "every", "best", "asynchronous", "overwrite"))
        self._background = Background()
        self._num_calls = 0
        self._last_call: int | None = None
        self._stop_key = ""
        self._is_resumed = self._has_metric = False
        self._not_saved: tuple[int, dict[str, Any]] | None = None
        """The last step that `save` was called with but didn't save, as it wasn't due."""
        self._written_by_rank_0: str | None = None
        # The memory of the last snapshot that was written. While one is made or written, its memory is not here: an
        # interrupt may come at any moment, and what it leaves behind must not be overwritten.
        self._spare: list[SnapshotMemory] = []

    def resume(self, step: int | None = None) -> int:
        """Load the newest intact checkpoint, or that of a step, into the objects and the random generators.

        Args:
            step: Which checkpoint to load; by default the newest intact one, with a warning about damaged ones.
        Returns:
            Its step; 0 if the directory has no checkpoints.
        Raises:
            CheckpointError: as `everygpu.load` raises it; then nothing was changed.
        """
        self.wait()
        path, found = self.directory, 0
        if step is not None:
            path = step_path(self.directory, _require_step(step, "resume"))
            _require_of_run(path, "resume")
        if step is not None or list_saved(path):
            found = load(path, rng=True, **self._objects)["step"]
        self._is_resumed, self._is_clearing = True, False
        return found

    def save(self, step: int, /, **metrics: Any) -> Path | None:
        """Save a checkpoint, then remove those that need not be kept.

        Args:
            step: The number of batches or epochs, 0 or more. If the last one is no multiple of ``every``, it is saved
                when the block ends.
            **metrics: Numbers to choose the best by, or a `Meter`, which is synced over ranks. Only finite ones count.
        Returns:
            The checkpoint's path, which exists once `wait` has returned; None if nothing was due.
        Raises:
            CheckpointError: as `everygpu.save` raises it, also in the background; or the run was not resumed.
            OptionError: the step is no whole number from 0 on, a metric no number, or ``best`` has another name.
            SystemExit: with 143, once it is written, where a signal has asked for that.
        """
        if current_group() is None:  # else errors are raised at steps at which all ranks do
            self._background.check()
        step = _require_step(step, "save")
        if not self._objects:
            raise OptionError("save: There is nothing to save. Write CheckpointManager(directory, model=model).")
        is_last = self._is_last()
        if step % self.every != 0 and not is_last:
            self._not_saved = (step, metrics)
            if is_main():
                self._require_resumed()
            return None
        self._save(step, metrics)
        path = step_path(self.directory, step)
        if is_last:
            self.wait()
            stop().is_ending, stop().heard = True, None
            logger.warning("%s is saved: the run ends with exit code %d, as a signal asks.", path, STOPPED)
            raise SystemExit(STOPPED)
        return path

    def latest(self) -> Path | None:
        """Return the newest checkpoint whose files have their full size; None if no checkpoint has."""
        self._finish_background()
        return next((saved.path for saved in list_saved(self.directory) if saved.is_readable), None)

    def best(self) -> Path | None:
        """Return the best checkpoint by the metric of ``best=``, without which it is an error; None if none has it."""
        self._finish_background()
        if self._best is None:
            raise OptionError("best: No metric is known. Write CheckpointManager(directory, best=('loss', 'min', 1)).")
        found = best_first(list_saved(self.directory), *self._best[:2])
        return found[0].path if found else None

    def wait(self) -> None:
        """Wait for what is being saved in the background, and raise what went wrong there."""
        self._background.wait()
        key, self._written_by_rank_0 = self._written_by_rank_0, None
        if key is not None:
            wait_for_main(key)

    def close(self) -> None:
        """Save the last step if it was not due, wait, and free the memory for snapshots; it can be used again."""
        self.__exit__(None, None, None)

    def __enter__(self) -> "CheckpointManager":
        stop().listen(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, KeyboardInterrupt):  # the interpreter's end, and the next call, wait: a second ends it now
            return
        try:
            if error is None and self._not_saved is not None:
                self._save(*self._not_saved)
            self.wait()
            if error is None and self._best and not self._has_metric and self._num_calls:
                logger.warning("save: No save to %s had the metric %r of best.", self._name, self._best[0])
        except CheckpointError:
            if error is None:  # else the log has it, and the block's own error is the one to see
                raise
        finally:
            while self._spare:
                self._spare.pop().release()
            self._last_call, self._stop_key = None, ""
            stop().leave(self, has_failed=error is not None)

    def _is_last(self) -> bool:
        """Whether a signal has made this call of save the last one; all ranks find the same call."""
        stop().listen(self)
        self._num_calls += 1
        self._stop_key = self._stop_key or next_key(f"last save to {self._name}")
        if self._last_call is None:
            self._last_call = stop().find_last(self._stop_key, self._num_calls)
        is_last = self._last_call is not None and self._num_calls >= self._last_call
        # Rank 0 writes, and can be ended meanwhile, which ends all. The others only wait for it.
        stop().is_ending = is_last and not is_main()
        return is_last

    def _save(self, step: int, given: Mapping[str, Any]) -> None:
        metrics = self._take_metrics(given)
        self._not_saved = self._written_by_rank_0 = None
        name = f"save step {step} to {self._name}"
        begun, written = next_key(name), next_key(f"{name} in the background")
        if is_spread(self._objects):  # all ranks write
            write_once(begun, self._require_resumed)
            self._background.wait()
            gathered = collect_state(self._objects, written)
            start = self._background.start if self.asynchronous else self._background.run
            start(lambda: write_together(gathered, lambda: self._write(gathered, step, metrics)))
            self._is_resumed = True
            return
        write_once(begun, lambda: self._begin(step, metrics, written))
        self._written_by_rank_0 = None if is_main() or not self.asynchronous else written

    def _begin(self, step: int, metrics: dict[str, float], written: str) -> None:
        self._require_resumed()
        self._background.wait()
        if self.asynchronous:
            write = self._copy(step, metrics)
            self._background.start(lambda: write_once(written, write))
        else:
            snapshot = collect_state(self._objects)
            wait_for_devices(snapshot)
            self._background.run(lambda: self._write(snapshot, step, metrics))
        self._is_resumed = True

    def _require_resumed(self) -> None:
        """Refuse to mix this run's checkpoints with another one's."""
        if not self._is_resumed and not self._is_clearing and (saved := list_saved(self.directory)):
            what = f"{self._name} has checkpoints of an earlier run, the newest of step {saved[0].step}"
            raise CheckpointForeignError(f"save: {what}. Call resume() first to continue it, or pass overwrite=True.")

    def _take_metrics(self, given: Mapping[str, Any]) -> dict[str, float]:
        # A Meter's rows are those of one rank; all ranks come here.
        numbers = {n: _number(n, value.sync() if hasattr(value, "sync") else value) for n, value in given.items()}
        if self._best is not None and numbers:
            self._has_metric |= self._best[0] in numbers
            if not self._has_metric:  # it may be computed at some saves only
                got = ", ".join(map(repr, numbers))
                raise OptionError(f"save: best is by {self._best[0]!r}, got {got}. Give both the same name.")
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def _finish_background(self) -> None:
        """Raise what went wrong in the background; under ranks wait for it too, so that all find the same."""
        if current_group() is None:
            self._background.check()
        else:
            self.wait()

    def _copy(self, step: int, metrics: dict[str, float]) -> Callable[[], None]:
        """Copy the state to host memory; return what writes it from there."""
        memory = self._spare.pop() if self._spare else SnapshotMemory()
        try:
            arrived = memory.copy(collect_state(self._objects))
        except BaseException:
            memory.wait()
            self._spare[:] = [memory]
            raise

        def write() -> None:
            try:
                self._write(arrived(), step, metrics)
            finally:
                self._spare[:] = [memory]

        return write

    def _write(self, snapshot: StateSnapshot, step: int, metrics: dict[str, float]) -> None:
        if is_claimed(self.directory):
            other = self._name.with_name(f"{self._name.name}-run")
            raise CheckpointForeignError(f"save: {self._name} is a checkpoint itself. Choose for instance {other}.")
        with must_be_writable(self.directory, "save"):
            self.directory.mkdir(parents=True, exist_ok=True)
            with hold_lock(self.directory / LOCK):
                finish_interrupted_saves(self.directory)
                saved, path = list_saved(self.directory), step_path(self.directory, step)
                _require_of_run(path, "save")
                run = {"step": step, "serial": max((s.serial for s in saved), default=-1) + 1, "metrics": metrics}
                write_checkpoint(path, snapshot, run)
                keep, best = (1, None) if self._is_clearing else (self.keep, self._best)
                rotate(self.directory, keep, best)
                self._is_clearing = False


def _require_of_run(path: Path, function: str) -> None:
    if is_ours(path) and path not in (saved.path for saved in list_saved(path.parent)):
        raise CheckpointForeignError(f"{function}: {path} is a checkpoint, but not of a run. Move it.")


def _number(metric: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)  # float warns of a loss with a graph
    except (TypeError, ValueError, RuntimeError, OverflowError) as cause:
        raise OptionError(f"save: The metric {metric} is {cut(repr(value))}, no number. Leave it out.") from cause


def _require_step(step: Any, function: str) -> int:
    if type(step) is int and step >= 0:
        return step
    raise OptionError(f"{function}: step is a whole number from 0 on, got {cut(repr(step))}. Models go to the manager.")
