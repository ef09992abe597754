"""Ctrl-C anywhere in a save: what is on the disk stays whole, and the program can go on saving."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import everygpu
from everygpu import CheckpointManager
from tests.faults.savers import Weights, version_of

manager_module = import_module("everygpu.checkpoint.manager")
NAMES = ("background", "manager")

INTERRUPTED = {threading.__file__, *(import_module(f"everygpu.checkpoint.{name}").__file__ for name in NAMES)}
"""Where the caller's thread is during a save, apart from code that changes nothing."""


@contextmanager
def interrupt_at(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at a line, counted from 1, that this thread executes in a save; yield the count."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in INTERRUPTED or _is_in_finalizer(frame):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether what is raised would be dropped, as in every ``__del__``."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def fill(model: Weights, version: int) -> None:
    with torch.no_grad():
        for name, tensor in Weights(version, len(model.first)).state_dict().items():
            model.state_dict()[name].copy_(tensor)


def load_version(directory: Path) -> int:
    model = Weights(-1)
    everygpu.load(directory, model=model)
    return version_of(model.state_dict())


def press_ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def skip_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no time for the disk, but let the caller go on meanwhile."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: time.sleep(0.0002))


@pytest.mark.parametrize("call", ["save", "save and close"])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_an_interrupt_at_any_line_leaves_one_that_is_whole_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, call: str
) -> None:
    skip_disk(monkeypatch)
    # What a trace raises within an ``except`` stays the thread's current exception, here for all tests to come.
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(interrupt_everywhere, tmp_path / "run", asynchronous, call).result()


def interrupt_everywhere(run: Path, asynchronous: bool, call: str) -> None:
    model, line, last, step = Weights(1), 1, 10**6, 1
    with CheckpointManager(run, keep=1, asynchronous=asynchronous, model=model) as checkpoints:
        checkpoints.save(1)
        while line < last:
            fill(model, step + 1)
            try:
                with interrupt_at(line) as count:
                    checkpoints.save(step + 1)
                    if call == "save and close":
                        checkpoints.close()
                last = count[0]
            except KeyboardInterrupt:
                pass
            fill(model, step + 2)  # training goes on at once, as in the next cell of a notebook
            if line % 2:
                checkpoints.wait()
                assert load_version(run) in (step, step + 1)
            checkpoints.save(step + 2)
            checkpoints.wait()
            assert load_version(run) == step + 2
            assert len(os.listdir(run)) == 1
            line, step = line + 7, step + 2
    assert line > 20


needs_signals = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to threads")


@needs_signals
def test_after_an_interrupted_wait_the_save_goes_on_and_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    real, go_on = manager_module.write_checkpoint, threading.Event()

    def write(*args: Any, **options: Any) -> Any:
        assert go_on.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(manager_module, "write_checkpoint", write)
    model = Weights(1)
    with CheckpointManager(tmp_path, keep=2, asynchronous=True, model=model) as checkpoints:
        checkpoints.save(1)
        interrupt = threading.Timer(0.05, press_ctrl_c)

        def wait() -> None:
            interrupt.start()
            checkpoints.wait()

        with pytest.raises(KeyboardInterrupt):
            wait()
        interrupt.join()
        release = threading.Timer(0.05, go_on.set)
        release.start()
        fill(model, 2)
        checkpoints.save(2)  # waits for the first, whose memory it uses
        checkpoints.resume(1)
        assert version_of(model.state_dict()) == 1
        release.join()


@needs_signals
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_a_signal_s_handler_can_save_in_the_middle_of_a_save(tmp_path: Path, monkeypatch, asynchronous: bool) -> None:
    skip_disk(monkeypatch)
    model = Weights(1)
    with CheckpointManager(tmp_path, keep=1, asynchronous=asynchronous, model=model) as checkpoints:
        before = signal.signal(signal.SIGINT, lambda number, frame: checkpoints.save(10**6))
        try:
            for step in range(20):
                interrupt = threading.Timer(0.0002 * step, press_ctrl_c)
                fill(model, step)
                interrupt.start()
                checkpoints.save(step)
                interrupt.join()
                checkpoints.wait()
                assert load_version(tmp_path) == step
        finally:
            signal.signal(signal.SIGINT, before)
