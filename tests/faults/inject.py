"""Faults, put on a saver: the process killed, files cut off, bits flipped, the disk full.

Processes are forked from this one, which has imported torch already: starting Python takes two seconds.
"""

import contextlib
import errno
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tests.faults.savers import Saver, Weights, version_of

Outcome = Counter[str]
"""How often each thing happened: ``old`` or ``new`` was loaded bit by bit, or it was ``lost``."""

BOUNDARIES = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"})
"""Audit events at which a saver goes from one file or directory to the next."""

_LONGEST_S = 100
"""What takes longer hangs, and is killed."""


def kill_randomly(saver: Saver, root: Path, num_kills: int, seed: int = 0) -> Outcome:
    """Kill a process while it overwrites a checkpoint, at random times; load what is left, until one is lost.

    Times are drawn earlier after a save that went through, later after one that didn't: however busy the machine is,
    many come amid a save.

    Args:
        saver: What saves.
        root: An empty directory.
        num_kills: How often; further until a tenth of them left the old checkpoint.
        seed: Of the times.
    """
    chance = random.Random(seed)
    limit_s = 2 * _seconds(lambda: saver.save(root / "timed", Weights(0)))
    outcome: Outcome = Counter()
    while outcome.total() < num_kills or outcome["old"] < num_kills / 10:
        old = outcome.total()
        with contextlib.suppress(Exception):  # what is left may stand in the way of the next save
            saver.save(root / "ckpt", Weights(old))
        child = fork(partial(saver.save, root / "ckpt", Weights(old + 1)))
        time.sleep(chance.uniform(0, limit_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = what_is_there(saver, root / "ckpt", old)
        outcome[found] += 1
        if found == "lost":
            break
        limit_s *= 0.8 if found == "new" else 1.25
    return outcome


def kill_at_boundaries(
    save: Callable[[int], object], prepare: Callable[[int], object], every: int = 1
) -> Iterator[int]:
    """Kill a process right before each step it makes from file to file, so many steps further each time.

    Args:
        save: Overwrites the old checkpoint; takes the number of the boundary.
        prepare: Saves the old checkpoint.
    Returns:
        After each kill the number of the boundary, until a save goes through.
    """
    for boundary in range(1, 500, every):
        prepare(boundary)

        def save_up_to(boundary: int = boundary) -> None:
            die_at(boundary)
            save(boundary)

        _, status = os.waitpid(fork(save_up_to), 0)
        if status == 0:
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, f"the save ended with status {status}"
        yield boundary
    raise AssertionError("the save never went through")


def die_at(boundary: int) -> None:
    """End this process at a boundary, counted from now: nothing can be cleaned up."""
    passed = 0

    def count(event: str, args: tuple[object, ...]) -> None:
        nonlocal passed
        if event in BOUNDARIES and not (event == "open" and _is_of_python(args[0])):
            passed += 1
            if passed == boundary:
                os.kill(os.getpid(), signal.SIGKILL)

    real = os.fsync

    def fsync(descriptor: int) -> None:
        count("os.rename", ())
        real(descriptor)

    os.fsync = fsync
    sys.addaudithook(count)


def fork(work: Callable[[], object]) -> int:
    """Do work in a process and group of its own, which ends with status 0, with 1 if the work fails, or is killed."""
    child = os.fork()
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(child, child)  # on both sides: whoever comes first
    if child:
        return child
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LONGEST_S)
    status = 1
    try:
        torch.set_num_threads(1)  # OpenMP's threads were not forked with it: they would be waited for
        # Torch makes autograd's engine anew in a fork, without a lock: two threads that come first at once would crash.
        # No backward: after one of the parent's on a GPU, torch forbids it.
        torch.ones((), requires_grad=True).square()
        work()
        status = 0
    finally:
        os._exit(status)


def what_is_there(saver: Saver, path: Path, old: int) -> str:
    """Whether the old or the new version loads bit by bit."""
    try:
        version = version_of(saver.load(path))
    except Exception:
        return "lost"
    return {old: "old", old + 1: "new"}.get(version, "lost")


def truncate(path: Path, chance: random.Random) -> None:
    """Cut a file off at a random place."""
    os.truncate(path, chance.randrange(path.stat().st_size))


def flip_bit(path: Path, chance: random.Random) -> None:
    """Flip one random bit of a file."""
    with open(path, "r+b") as file:
        position = chance.randrange(path.stat().st_size)
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ (1 << chance.randrange(8))]))


def files_of(path: Path) -> list[Path]:
    """List the files of a checkpoint, be it one file or a directory."""
    return [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if entry.is_file())


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size: what comes after fails in the middle of a write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_at(saver: Saver, root: Path, limit: int, model: nn.Module) -> OSError | Exception | None:
    """Save over a checkpoint where no file may grow beyond a limit; return what came of it."""
    with file_size_limit(limit):
        try:
            saver.save(root / "ckpt", model)
        except Exception as error:
            return error
    return None


def is_disk_error(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is the system's about a disk that takes no more."""
    cause = error if isinstance(error, OSError) and error.errno else error and error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EFBIG, errno.ENOSPC)


def _is_of_python(path: object) -> bool:
    """Whether a file is opened to import a module."""
    return str(path).endswith((".py", ".pyc", ".so", ".dist-info", "METADATA"))


def _seconds(work: Callable[[], object]) -> float:
    """Time what a process of its own does, when nothing else holds it up: most kills are to come before its end."""
    work()  # imports what it needs
    read, write = os.pipe()
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        child = fork(lambda: (work(), os.write(write, b".")))
        os.read(read, 1)
        found.append(time.perf_counter() - begin)
        os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    return min(found)
