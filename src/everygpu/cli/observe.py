"""Run a user's script until it iterates its DataLoader, to measure that loader or to replace its batches."""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from everygpu.checkpoint.left_out import saves_left_out
from everygpu.checkpoint.loaders import without_position
from everygpu.cli.script import run_module, run_script
from everygpu.feed.batch_size import STEPS_PER_TRIAL, limited_memory, resize
from everygpu.parallel.scatter.row_count import find_rows

OnIterate = Callable[[Any, Callable[[], Iterator[Any]]], Iterator[Any]]
"""From a DataLoader and the way to iterate it as usual, to what its consumer gets."""


class Stop(BaseException):
    """Ends a script from within; no Exception, so that it is not caught on the way."""


def find_loader(
    script: str, args: Sequence[str], which: int, is_module: bool = False
) -> tuple[DataLoader[Any] | None, str | int | None]:
    """Run a script until it iterates a DataLoader.

    Args:
        script: Path of the file, or name of the module.
        args: Its arguments.
        which: 1 for the first DataLoader that the script iterates, 2 for the next other one.
        is_module: Whether it is a module.
    Returns:
        The DataLoader, from its first batch on; or None and the script's exit code when it ended before.
    """
    found: list[DataLoader[Any]] = []

    def stop(loader: Any, _: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        found.append(loader)
        raise Stop

    # What the script's own blocks do at its end: the model there may be one that was never trained.
    with _on_iterate(which, stop), saves_left_out("tune", lambda: bool(found)):
        code = _run(script, args, is_module)
    return (found[0] if found else None), code


def run_trial(
    script: str,
    args: Sequence[str],
    which: int,
    num_rows: int,
    headroom_pct: float,
    result: Path,
    is_module: bool = False,
) -> str | int | None:
    """Run a script for a few steps on batches of another size, and write down whether memory ran out.

    From the first of these batches on, its saves are left out.

    Args:
        script, args, which, is_module: As for ``find_loader``.
        num_rows: Rows of its batches; 0 to leave them as they are.
        headroom_pct: Share of each GPU's memory that is to stay free.
        result: A file for what came out; it stays empty when the script fails by itself.
    Returns:
        The script's exit code; 0 when it was ended here.
    """
    seen: dict[str, Any] = {}

    def feed(_: Any, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        return _few_batches(iterate, num_rows, lambda: limit.enter_context(limited_memory(_gpus(), headroom_pct)), seen)

    # Lifted and measured after the script's end: what loads ahead asks for one batch more while steps go on.
    with ExitStack() as limit, _on_iterate(which, feed), saves_left_out("tune", lambda: "num_rows" in seen) as saves:
        code = _run(script, args, is_module, seen)
        if seen.get("fits"):
            seen["peak_bytes"] = _measure_peak()
    if saves:
        seen["saves_left_out"] = True
    if ("fits" in seen or "is_empty" in seen) and not code:
        result.write_text(json.dumps(seen))
    return code


def _few_batches(
    iterate: Callable[[], Iterator[Any]], num_rows: int, limit_memory: Callable[[], object], seen: dict[str, Any]
) -> Iterator[Any]:
    batches = list(islice(iterate(), 1))
    if not batches:
        seen["is_empty"] = True
        raise Stop
    [batch] = batches
    seen["num_rows"] = num_rows or find_rows([("batch", batch)], 0) or 0
    limit_memory()
    for _ in range(STEPS_PER_TRIAL):
        yield resize(batch, seen["num_rows"], 0)
    seen["fits"] = True
    raise Stop


def _measure_peak() -> int | None:
    """Wait for the steps, and return the most memory that they took on any one GPU."""
    for gpu in _gpus():
        torch.cuda.synchronize(gpu)
    return max((torch.cuda.max_memory_reserved(gpu) for gpu in _gpus()), default=None)


def _gpus() -> list[torch.device]:
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def _run(script: str, args: Sequence[str], is_module: bool, seen: dict[str, Any] | None = None) -> str | int | None:
    """Run a script to its end, or to ours."""
    ends: list[BaseException] = []

    def keep(error: BaseException) -> bool:
        # Memory that runs out before the first batch does so at every size: that is the script's own failure.
        is_memory = isinstance(error, torch.OutOfMemoryError) and seen is not None and "num_rows" in seen
        is_ours = isinstance(error, Stop) or is_memory
        if is_ours:
            ends.append(error)
        return is_ours

    code = (run_module if is_module else run_script)(script, args, keep)
    if seen is not None and any(isinstance(e, torch.OutOfMemoryError) for e in ends):
        seen["fits"] = False
    return code


@contextmanager
def _on_iterate(which: int, answer: OnIterate) -> Iterator[None]:
    """Have a function answer when the script iterates its n-th DataLoader, counted by when each is first iterated.

    A pass that was resumed begins anew, as nothing may be left of it.
    """
    plain = DataLoader.__iter__
    known: list[Any] = []

    def observed(loader: Any) -> Iterator[Any]:
        if not any(loader is other for other in known):
            known.append(loader)
        if len(known) < which or loader is not known[which - 1]:
            return plain(loader)
        loader = without_position(loader)
        return answer(loader, functools.partial(plain, loader))

    DataLoader.__iter__ = observed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DataLoader.__iter__ = plain  # type: ignore[method-assign]
