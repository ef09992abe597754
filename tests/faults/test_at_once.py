"""Two threads, two processes, two models at once: right results, or a clear error.

Forks, two models, two threads that call one, and forwards within forwards: tests/parallel/test_wrapper_life.py.
"""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu.errors import CallError

X = torch.arange(24.0).reshape(6, 4)


def call_while(model: everygpu.DataParallel, release: Callable[[], None], seconds: float) -> list[str]:
    """Train in two threads while a third one releases; return what went wrong there."""
    wanted, wrong, is_over = model.module(X).detach(), [], threading.Event()

    def call() -> None:
        while not is_over.is_set():
            try:
                y: Tensor = model(X)
                torch.testing.assert_close(y.detach(), wanted)
                y.sum().backward()
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        release()
        time.sleep(0.001)
    is_over.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a call waits forever"
    return wrong


def test_a_thread_calls_while_another_releases() -> None:
    model = everygpu.DataParallel(nn.Linear(4, 2), ["cpu"] * 3)
    assert call_while(model, model.release, 0.2) == []


def test_a_replica_releases_its_own_wrapper() -> None:
    class Net(nn.Module):
        releases = True

        def forward(self, x: Tensor) -> Tensor:
            if self.releases:
                model.release()
            return x * 2

    model = everygpu.DataParallel(Net(), ["cpu"] * 2)
    with pytest.raises(CallError, match="Call release.. after forward"):
        model(X)
    model.module.releases = False
    torch.testing.assert_close(model(X), X * 2)
