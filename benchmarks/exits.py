"""Programs that save and are interrupted, end, or are killed, over and over; what is on the disk afterwards.

Each program is a process forked from one that has imported all it needs. It ends as the interpreter ends, up to the
last function of ``atexit``; only modules are not torn down, which takes a second.

    python -m benchmarks.exits SAVER   # reads programs from its input, one as JSON a line; writes how each went
"""

import atexit
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from benchmarks.async_savers import ASYNC_SAVERS, NUM_ELEMENTS, AsyncSaver, Run
from tests.faults.savers import Weights
from torch.utils.data import DataLoader

ENDS = ("end of script", "sys.exit", "exception", "Ctrl-C", "save in atexit", "thread that outlives main")
INTERRUPTED = ("Ctrl-C, the handler saves", "Ctrl-C, the next cell of a notebook saves")
KILLED = "kill -9 with slow workers, then resumed"

_LAST_STEP = 10**6
_LONGEST_S = 30
_LONGEST_TRAINING_S = 5
_LONGEST_WAIT_S = 0.1  # a save or several, before the signal comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one process does."""

    root: str
    what: str
    """One of `ENDS` or `INTERRUPTED`, or `KILLED`."""
    keep: int = 3
    signal_after_s: float = 0.0


class Server:
    """A process that forks programs of one saver."""

    def __init__(self, saver: AsyncSaver) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.exits", saver.name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, program: Program) -> str:
        """Run a program to its end; return how its last checkpoint was found."""
        print(json.dumps(asdict(program)), file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip() if self._process.stdout else ""

    def close(self) -> None:
        self._process.communicate()


def count_outcomes(server: Server, what: str, num_tries: int, keep: int) -> str:
    """Run a program over and over; tell how often the newest checkpoint was not there, or not as it was saved."""
    chance, outcomes = random.Random(0), Counter[str]()
    with tempfile.TemporaryDirectory() as root:
        for index in range(num_tries):
            directory = Path(root, str(index))
            after_s = chance.uniform(0, _LONGEST_WAIT_S)
            outcomes[server.run(Program(root=str(directory), what=what, keep=keep, signal_after_s=after_s))] += 1
            shutil.rmtree(directory, ignore_errors=True)
    bad = {name: count for name, count in sorted(outcomes.items()) if name != "whole"}
    words = f"{sum(bad.values())} of {num_tries} lost"
    return words + (f" ({', '.join(f'{count} {name}' for name, count in bad.items())})" if bad else "")


def exits_table(num_interrupts: int, num_exits: int, num_kills: int) -> Iterator[str]:
    """Try everything on every saver that is installed; yield a Markdown table line by line."""
    savers = [saver for saver in ASYNC_SAVERS if saver.is_there()]
    servers = [Server(saver) for saver in savers]
    rows = [(f"{what}, keep={keep}", what, num_interrupts, keep) for keep in (1, 3) for what in INTERRUPTED]
    rows += [(f"saved last, then: {what}", what, num_exits, 3) for what in ENDS]
    rows += [(KILLED, KILLED, num_kills, 3)]
    yield "| fault | " + " | ".join(saver.name for saver in savers) + " |"
    yield "|---" * (len(savers) + 1) + "|"
    for title, what, num_tries, keep in rows:
        cells = [count_outcomes(server, what, num_tries, keep) for server in servers]
        yield f"| {title} | " + " | ".join(cells) + " |"
    for server in servers:
        server.close()
    missing = [saver.name for saver in ASYNC_SAVERS if not saver.is_there()]
    if missing:
        yield f"\nNot installed, so not run: {', '.join(missing)}."


# In the server, and in the processes that it forks.


def serve(saver: AsyncSaver) -> Callable[[], object] | None:
    """Fork a process for each program; return in each what it is to do, and None in the server at the end."""
    saver.begin(Path(tempfile.gettempdir()), 1)  # imports what it needs
    for line in sys.stdin:
        program = Program(**json.loads(line))
        ready, is_ready = os.pipe()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.close(ready)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.alarm(_LONGEST_S)
            atexit.register(lambda: os._exit(hasattr(sys, "last_value")))  # the first registered is the last called
            return lambda: _do(saver, program, is_ready)
        os.close(is_ready)
        os.read(ready, 1)
        os.close(ready)
        print(_watch(saver, program, child), flush=True)
    return None


def _watch(saver: AsyncSaver, program: Program, child: int) -> str:
    """Send a program its signal, wait for its end, and look at what it has left."""
    if program.what in (*INTERRUPTED, KILLED):
        time.sleep(program.signal_after_s)
        os.kill(child, signal.SIGKILL if program.what == KILLED else signal.SIGINT)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if program.what in INTERRUPTED and status != 0:
        return "hung" if status == -signal.SIGALRM else "failed to go on"
    try:
        if program.what == KILLED:  # the workers are there still, as of a run that is begun anew at once
            run = saver.begin(Path(program.root), program.keep)
            run.save(_LAST_STEP, Weights(_LAST_STEP, NUM_ELEMENTS))
            run.close()
        version = saver.load(Path(program.root))
    except AssertionError:
        return "mixed"
    except Exception as error:  # noqa: BLE001 - whatever a saver fails with is the outcome
        return f"unreadable: {type(error).__name__}"
    finally:
        if program.what == KILLED:
            os.killpg(child, signal.SIGKILL)
    return "whole" if version == _LAST_STEP else "not the last"


def _do(saver: AsyncSaver, program: Program, is_ready: int) -> None:
    Path(program.root).mkdir()
    run, model = saver.begin(Path(program.root), program.keep), Weights(0, NUM_ELEMENTS)
    if program.what in INTERRUPTED:
        _train_until_interrupted(run, model, is_ready)
        for step in [_LAST_STEP] if program.what == INTERRUPTED[0] else range(_LAST_STEP - 3, _LAST_STEP + 1):
            _fill(model, step)
            run.save(step, model)
        run.close()
    elif program.what == KILLED:
        run.save(0, model)
        workers = iter(DataLoader(_SlowData(), num_workers=2, multiprocessing_context="fork"))
        os.write(is_ready, b"x")
        next(workers)
    else:
        run.save(0, model)
        run.close()
        _fill(model, _LAST_STEP)
        os.write(is_ready, b"x")
        _end(program.what, lambda: run.save(_LAST_STEP, model))


def _train_until_interrupted(run: Run, model: Weights, is_ready: int) -> None:
    step = 0
    try:
        run.save(0, model)
        run.close()
        os.write(is_ready, b"x")
        end = time.monotonic() + _LONGEST_TRAINING_S  # Python drops an interrupt that comes in a finalizer
        while time.monotonic() < end:
            step += 1
            _fill(model, step)
            run.save(step, model)
    except KeyboardInterrupt:
        return


def _end(how: str, save: Callable[[], object]) -> None:
    if how == "save in atexit":
        atexit.register(save)
    elif how == "thread that outlives main":
        threading.Thread(target=_outlive_main, args=(save,)).start()
    else:
        save()
    if how == "sys.exit":
        sys.exit(3)
    if how == "exception":
        raise ValueError("of the program's own")
    if how == "Ctrl-C":
        signal.raise_signal(signal.SIGINT)


def _outlive_main(work: Callable[[], object]) -> None:
    threading.main_thread().join()
    work()


def _fill(model: Weights, version: int) -> None:
    with torch.no_grad():
        model.first.fill_(version)
        model.second.copy_(torch.arange(NUM_ELEMENTS) + version)
        model.get_buffer("counts").fill_(version)


class _SlowData(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        time.sleep(_LONGEST_S)
        yield 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # a fork has none of OpenMP's threads
    work = serve(next(saver for saver in ASYNC_SAVERS if saver.name == sys.argv[1]))
    if work is not None:
        work()
