"""Fixtures shared by all tests: the devices to run on, and a check that no test leaves anything behind."""

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.warm_python import WarmPython

# The same examples every time, so that a checkout passes or fails for good. To look for new ones:
# `HYPOTHESIS_PROFILE=explore make test`, with other examples at each run.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
torch.manual_seed(0)  # for what modules make while they are imported
# One process for each core, by each of the processes that run tests, would be too many; and these graphs are small.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Nor are vector instructions what is tested: to see which of them its C++ compiler knows takes that seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# pytest gives its handlers to each logger that doesn't propagate, three times a test, and torch has forty. By one of
# them it would write down each step of each compilation.
for logger in logging.Logger.manager.loggerDict.values():
    if isinstance(logger, logging.Logger):
        logger.propagate = True

OPEN_FILES = Path("/proc/self/fd")
MANY_MODULES = 50
"""A test that has more imported, such as torch's compiler, leaves them out of the collections of those after it."""


@pytest.fixture
def shared_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[torch.device]]:
    """``shared_gpus(n)`` gives n replicas' GPUs, on as many cards as there are."""

    def choose(num_replicas: int) -> list[torch.device]:
        count = torch.cuda.device_count() or pytest.skip("needs a card")
        if num_replicas > count:
            monkeypatch.setenv("EVERYGPU_SHARE_GPU", "1")
        return [torch.device("cuda", i % count) for i in range(num_replicas)]

    return choose


@pytest.fixture
def nccl_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks by NCCL: with a card each, or on one card, which NCCL takes from 2.30 on where it is told to."""
    if torch.cuda.device_count() < 2:
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            pytest.skip("needs 2 cards, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")
        monkeypatch.setenv("EVERYGPU_SHARE_GPU", "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def devices(
    request: pytest.FixtureRequest, shared_gpus: Callable[[int], list[torch.device]]
) -> Callable[[int], list[torch.device]]:
    """``devices(n)`` gives n replicas' devices: CPU replicas by default, real GPUs under ``-m gpu``."""
    return shared_gpus if request.param == "cuda" else lambda num_replicas: [torch.device("cpu")] * num_replicas


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max((mark.args[0] for mark in item.iter_markers("cards")), default=0)
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if params.get("devices") != "cpu" and needed and torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} cards")


def _wait_for_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    """Give threads of dropped objects time to end; return those that did not."""
    deadline = time.monotonic() + 60
    while extra := {thread for thread in set(threading.enumerate()) - before if not _is_foreign(thread)}:
        if time.monotonic() > deadline:
            break
        gc.collect()
        for thread in extra:
            thread.join(0.01)
    return extra


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether a thread is pytest's, or torch's own: autograd's, or one its compiler starts; ours have names."""
    names = (
        "pytest_timeout",
        "tqdm_monitor",
        "InductorSubproc",
        "subproc_worker_timer",
        "ThreadPoolExecutor-",
    )
    return thread.name.startswith(names) or isinstance(thread, threading._DummyThread)


def _num_open_files() -> int:
    return len(list(OPEN_FILES.iterdir())) if OPEN_FILES.is_dir() else 0


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Look for no garbage while tests are collected: what that makes stays."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what torch and the tests themselves consist of out of garbage collections: many tests ask for one."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> Iterator[None]:
    """Leave out, too, what a file of tests has left in torch's caches."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_server() -> Iterator[WarmPython]:
    """Python that has imported torch, for ``warm_python``."""
    with closing(WarmPython()) as server:
        yield server


@pytest.fixture
def warm_python(warm_server: WarmPython) -> Iterator[None]:
    """Have a test start Python without waiting for torch's import."""
    with warm_server.serving():
        yield


@pytest.fixture(autouse=True, scope="session")
def driver_is_open() -> None:
    """Have the GPUs' driver open its files here, once, and not in the first test that asks for it."""
    torch.cuda.device_count()
    torch.cuda.is_available()
    ensure_running()  # multiprocessing's, of what spawned processes leave behind: it stays


@pytest.fixture(autouse=True, scope="session")
def exact_products() -> None:
    """Have cuDNN not round to TF32, as tests compare what shards and whole batches give."""
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Heed Ctrl-C, here and in what tests start, also where the shell that runs this in the background does not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Draw the same random numbers in every run, whichever tests are run before."""
    if settings().derandomize:
        random.seed(0)
        # What torch.manual_seed does for GPUs that aren't in use takes 300 times as long.
        (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)


HAS_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[HAS_FAILED] = item.stash.get(HAS_FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, an open file, a changed environment or torch state behind."""
    threads = set(threading.enumerate())
    environment = dict(os.environ)
    files, num_modules = _num_open_files(), len(sys.modules)
    yield
    if request.node.stash[HAS_FAILED]:
        return  # its traceback holds what it has made
    request.node.funcargs.clear()  # models that fixtures have made
    assert not _wait_for_threads(threads), "the test left threads behind"
    changed = {k for k in set(environment) | set(os.environ) if environment.get(k) != os.environ.get(k)}
    # torch sets the others when an optimizer first makes it import its compiler, and when that generates code.
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}
    changed -= {"TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"}
    changed -= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # scikit-learn's import
    changed -= {"CUDA_DEVICE_ORDER"}  # Lightning's, where there are GPUs
    assert not changed, f"the test changed the environment: {changed}"
    assert torch.is_grad_enabled(), "the test left grad mode off"
    assert torch.get_default_device() == torch.device("cpu"), "the test left a default device"
    if OPEN_FILES.is_dir() and not torch.cuda.is_initialized():
        if _num_open_files() > files:
            gc.collect()
        assert _num_open_files() <= files, "the test left files open"
    if len(sys.modules) > num_modules + MANY_MODULES:
        gc.collect()
        gc.freeze()
