"""One process per GPU from a notebook, where there is no script for torchrun to start."""

import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from everygpu.child import count_cores
from everygpu.errors import DeviceError, OptionError, RankError
from everygpu.ranks.group import leave

T = TypeVar("T")
END_S = 30.0
"""How long ranks that are ended may take, before they are killed."""


def launch(function: Callable[..., T], *args: Any, processes: int | None = None) -> list[T]:
    """Call a function in several processes of this machine that train together, one per GPU::

        def train(learning_rate):
            model = everygpu.DataParallel(torch.nn.Linear(2, 1))  # on this process's own GPU
            optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
            model(torch.ones(4, 2)).mean().backward()
            optimizer.step()
            return model.state_dict()

        weights, _ = everygpu.launch(train, 0.1, processes=2)

    Use it in notebooks for models that can't be captured and would run in threads. Start a script with
    ``everygpu run --processes auto train.py`` or torchrun instead. cloudpickle copies what the function uses to the
    processes: create the model inside the function, so that its weights aren't copied.

    Args:
        function: Called in each process with ``args``; may be defined in a cell.
        *args: Anything that can be pickled.
        processes: How many; by default one per visible GPU. On a machine without GPUs they use the CPU.
    Returns:
        What each process returned, by rank.
    Raises:
        DeviceError: there is no GPU, and ``processes`` is left out; or there are fewer GPUs.
        OptionError: the function or an argument can't be pickled, or this is one of several processes itself.
        RankError: a process has failed or given no result; the message has its rank and traceback, and the others are
            ended, as they are after Ctrl-C.
    Source:
        ``torch.multiprocessing.start_processes`` with ``"spawn"``; the variables are torchrun's.
    """
    size = _check(processes)
    try:
        call = cloudpickle.dumps((function, args))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise OptionError(
            f"launch: the function and its arguments must be picklable: {error}. Make the rest within the function."
        ) from error
    with tempfile.TemporaryDirectory(prefix="everygpu-") as folder:
        given = (call, size, _free_port(), folder)
        context = start_processes(_run, given, size, join=False, start_method="spawn")  # type: ignore[no-untyped-call]
        try:
            while not context.join():
                pass
        except (ProcessRaisedException, ProcessExitedException) as error:
            _check_ends(context.processes, folder)
            raise RankError(
                f"Rank {error.error_index} failed, and the others were ended. {str(error).strip()}"
            ) from None
        finally:
            _end(context.processes)
        _check_ends(context.processes, folder)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]


def _check(processes: int | None) -> int:
    if dist.is_initialized() or "RANK" in os.environ:
        raise OptionError("launch: this is one of several processes already. Call the function itself.")
    count = torch.cuda.device_count()
    if processes is None and not count:
        raise DeviceError("launch: no GPU found. Pass processes=2 to use the CPU.")
    size = count if processes is None else processes
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise OptionError(f"launch: processes must be 1 or more, got {processes!r}.")
    if 0 < count < size:
        raise DeviceError(f"launch: {size} processes asked for, but {count} GPUs found. Pass processes={count}.")
    return size


def _check_ends(processes: list[Any], folder: str) -> None:
    """Name a rank that has ended by itself without a result: its file is made as it begins, and filled at its end."""
    for rank, process in enumerate(processes):
        path = Path(folder, str(rank))
        if not path.exists() and process.exitcode in (0, 1):
            raise RankError(
                f"Rank {rank} has ended before it began, with exit code {process.exitcode}: each process imports the "
                f"script first, and its traceback is above. Call everygpu.launch under `if __name__ == '__main__':`."
            )
        if process.exitcode == 0 and not path.stat().st_size:
            raise RankError(
                f"Rank {rank} has ended by itself, as by sys.exit(0). Have the function return on each rank."
            )


def _end(processes: list[Any]) -> None:
    """End what still runs, as after Ctrl-C: a checkpoint may be saved meanwhile."""
    for process in processes:
        process.terminate()
    limit = time.monotonic() + END_S
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        process.kill()


def _run(rank: int, call: bytes, size: int, port: int, folder: str) -> None:
    """Be one of the processes."""
    Path(folder, str(rank)).touch()
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}})
    torch.set_num_threads(max(1, count_cores() // size))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    function, args = pickle.loads(call)
    result = function(*args)
    Path(folder, str(rank)).write_bytes(cloudpickle.dumps(result))
    leave()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
