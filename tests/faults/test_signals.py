"""SIGTERM and SIGUSR1 in training, evaluation, warm-up and a save: a checkpoint, then exit 143."""

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import everygpu
from everygpu import CheckpointManager
from everygpu.ranks.group import init_group
from tests.faults.inject import fork
from tests.faults.test_resume import Training, read
from tests.ranks.harness import run_ranks, running

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
stop_signals = import_module("everygpu.checkpoint.stop")
TERM, USR1 = signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)
Hook = Callable[[str], object]


def end_of(work: Callable[[], object]) -> int:
    """Do work in a process of its own; return its exit code, or the negative signal that killed it."""

    def exiting() -> None:
        try:
            work()
        except SystemExit as stop:
            os._exit(int(stop.code or 0))

    return os.waitstatus_to_exitcode(os.waitpid(fork(exiting), 0)[1])


def send(*signals: int) -> None:
    for number in signals:
        os.kill(os.getpid(), number)


def at(place: str, *signals: int) -> Hook:
    """Make what sends this process signals at a place of the training."""
    return lambda here: send(*signals) if here == place else None


def train(directory: Path, on: Hook, **options: Any) -> None:
    """Train for four steps, with an evaluation after the second one."""
    model = torch.nn.Linear(2, 1)
    with CheckpointManager(directory, **{"every": 1000, "model": model, **options}) as checkpoints:
        on("warm-up")
        for step in range(1, 5):
            on(f"step {step}")
            checkpoints.save(step)
            if step == 2:
                on("evaluation")
        on("end")
    on("outside")


def saved_in(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("place", "step"), [("warm-up", 1), ("step 2", 2), ("evaluation", 3)])
def test_is_saved_at_the_next_step(tmp_path: Path, place: str, step: int, asynchronous: bool) -> None:
    number = USR1 if place == "step 2" else TERM
    assert end_of(partial(train, tmp_path / "run", at(place, number), asynchronous=asynchronous)) == 143
    assert saved_in(tmp_path / "run") == [step]
    everygpu.load(tmp_path / "run", model=torch.nn.Linear(2, 1))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_in_a_save(tmp_path: Path, asynchronous: bool) -> None:
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        real(descriptor)
        calls.append(send(TERM) if not calls else None)

    def on(place: str) -> None:
        while place == "step 2" and not calls:
            time.sleep(0.001)

    def work() -> None:
        os.fsync = fsync
        train(tmp_path / "run", on, every=1, asynchronous=asynchronous)

    assert end_of(work) == 143
    assert saved_in(tmp_path / "run") in ([1, 2], [1, 2, 3])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_no_143(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "run").write_text("in the way")
    assert end_of(partial(train, tmp_path / "run", at("step 2", TERM), asynchronous=asynchronous)) == 1


def test_a_resumed_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    def go_on(name: str, seed: int, stop_at: int) -> None:
        training = Training(tmp_path / name, 2, num_workers=0, seed=seed)
        training.resume()
        plain = training.train

        def step(samples: torch.Tensor) -> str:
            if training.step + 1 == stop_at:
                send(TERM)
            return plain(samples)

        training.train = step  # type: ignore[method-assign]
        training.run(tmp_path / f"{name}.log", up_to=14)

    Training(tmp_path / "first", 1, num_workers=0).run([], up_to=1)  # torch imports its rest, once for all forks
    assert end_of(partial(go_on, "whole", 1, 0)) == 0
    assert end_of(partial(go_on, "run", 1, 11)) == 143
    assert saved_in(tmp_path / "run")[-1] == 11  # of which no multiple was due
    assert end_of(partial(go_on, "run", 50, 0)) == 0
    assert read(tmp_path / "run.log") == read(tmp_path / "whole.log")
    assert [step for step, _ in read(tmp_path / "run.log")] == [*range(1, 15)]


@pytest.mark.parametrize(
    ("signals", "again_s", "end"),
    [((TERM, TERM), 0.0, -TERM), ((TERM, TERM), 60.0, 143), ((TERM, USR1), 60.0, -USR1)],
)
def test_a_second_one_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: tuple[int, ...], again_s: float, end: int
) -> None:
    monkeypatch.setattr(stop_signals, "AGAIN_S", again_s)
    assert end_of(partial(train, tmp_path / "run", at("step 2", *signals))) == end
    assert saved_in(tmp_path / "run") == ([2] if end == 143 else [])


def test_after_the_last_save_it_ends_the_run_as_without_us(tmp_path: Path) -> None:
    assert end_of(partial(train, tmp_path / "run", at("end", TERM))) == -TERM
    assert end_of(partial(train, tmp_path / "other", at("outside", TERM))) == -TERM


def drop_in_a_thread(directory: Path) -> None:
    """Save, be signalled, and let another thread collect the manager; the process goes on for a while."""
    made = [CheckpointManager(directory, model=torch.nn.Linear(2, 1))]
    made[0].save(1)
    send(TERM)
    thread = threading.Thread(target=made.clear)
    thread.start()
    thread.join()
    time.sleep(60)


def drop_in_a_thread_first(directory: Path) -> None:
    made = [CheckpointManager(directory, model=torch.nn.Linear(2, 1))]
    made[0].save(1)
    thread = threading.Thread(target=made.clear)
    thread.start()
    thread.join()
    send(TERM)
    time.sleep(60)


def drop_here(directory: Path) -> None:
    run = CheckpointManager(directory, model=torch.nn.Linear(2, 1))
    run.save(1)
    send(TERM)
    del run
    time.sleep(60)


@pytest.mark.parametrize("work", [drop_here, drop_in_a_thread, drop_in_a_thread_first])
def test_outside_a_block_it_ends_the_run_when_no_manager_is_left(tmp_path: Path, work: Any) -> None:
    assert end_of(partial(work, tmp_path)) == -TERM
    assert saved_in(tmp_path) == [1]


AT_EXIT = """
import atexit, os, signal, sys, torch, everygpu
print("begins")
run = everygpu.CheckpointManager(sys.argv[1], model=torch.nn.Linear(2, 1))
atexit.register(print, "at exit")
run.save(1)
os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[2] == "save":
    run.save(2)
print("goes on")
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(("how", "code", "said"), [("", -TERM, "goes on\n"), ("save", 143, "")])
def test_outside_a_block_it_ends_the_run_at_the_end_of_the_script(
    tmp_path: Path, how: str, code: int, said: str
) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path / "run"), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, f"begins\n{said}at exit\n"), done.stderr


@pytest.mark.parametrize("what", ["ignored", "own", "of C", "set later"])
def test_what_the_user_has_set_stays(tmp_path: Path, what: str) -> None:
    def work() -> None:
        with open(tmp_path / "heard", "w") as file:
            own = lambda number, frame: print("heard, most recent call first", file=file)  # noqa: E731
            if what == "of C":
                faulthandler.register(USR1, file)
            elif what != "set later":
                signal.signal(USR1, signal.SIG_IGN if what == "ignored" else own)

            def on(place: str) -> None:
                if place == "step 2" and what == "set later":
                    signal.signal(USR1, own)
                at("step 3", USR1)(place)

            train(tmp_path / "run", on)
            send(USR1)

    assert end_of(work) == 0
    assert (tmp_path / "heard").read_text().count("most recent call first") == (0 if what == "ignored" else 2)
    assert saved_in(tmp_path / "run") == [4]  # the last, as the block ends


def is_heard(number: int) -> bool:
    return signal.getsignal(number) is not signal.SIG_DFL


def test_handlers_are_there_while_a_manager_is_in_use(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    first = CheckpointManager(tmp_path / "1", model=model)
    second = CheckpointManager(tmp_path / "2", model=model)
    assert not is_heard(TERM)
    first.save(1)
    with second:
        assert is_heard(TERM)
        assert end_of(lambda: send(TERM)) == -TERM, "a forked process ends as without us"
        first.close()
        assert is_heard(USR1)
    assert not is_heard(TERM)
    first.save(2)
    kept = weakref.ref(model)
    del first, second, model
    gc.collect()
    assert kept() is None, "a manager that was dropped is kept by its handlers"
    assert end_of(lambda: send(USR1)) == -USR1, "what was dropped hears nothing"
    with CheckpointManager(tmp_path / "3", model=torch.nn.Linear(2, 1)):
        pass
    assert not is_heard(USR1)


def train_by_ranks(directory: Path, signalled: tuple[int, ...]) -> None:
    rank = int(os.environ["RANK"])
    model = everygpu.DataParallel(torch.nn.Linear(2, 1), ["cpu"])
    with CheckpointManager(directory, every=1000, model=model) as checkpoints:
        for step in range(1, 10_000):
            model(torch.ones(2, 2)).sum().backward()
            if step == 3 and rank in signalled:
                send(TERM)
            checkpoints.save(step)


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("signalled", [(0,), (0, 1), (1,)], ids=str)
def test_all_ranks_stop_at_the_same_step(tmp_path: Path, signalled: tuple[int, ...]) -> None:
    with running(train_by_ranks, tmp_path / "run", signalled, size=2, folder=tmp_path / "results") as ranks:
        assert ranks.wait() == [143, 143], ranks.said
    assert not any("RankError" in said for said in ranks.said)
    assert saved_in(tmp_path / "run") in ([[4]] if 0 in signalled else [[4], [5]])
    assert "SIGTERM" in ranks.said[0]


def save_twice_by_ranks(directory: Path) -> int:
    """Train with a manager that a signal ends, catch that, and train with another one of the same name."""
    model, num_saved = everygpu.DataParallel(torch.nn.Linear(2, 1), ["cpu"]), 0
    for run in range(2):
        manager = CheckpointManager(directory, every=10, model=model)
        manager.resume()
        for step in range(1, 31):
            model(torch.ones(2, 2)).sum().backward()
            if run == 0 and step == 3 and init_group().rank == 0:
                send(TERM)
            try:
                manager.save(step)
            except SystemExit:
                break
            num_saved += 1
    return num_saved


@pytest.mark.usefixtures("warm_python")
def test_a_second_manager_of_the_name_knows_nothing_of_the_first_one_s_signal(tmp_path: Path) -> None:
    assert run_ranks(save_twice_by_ranks, tmp_path / "run", size=2, folder=tmp_path / "results") == [33, 33]
