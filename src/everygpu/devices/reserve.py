"""Keep two runs that start together from choosing the same GPU.

A run holds a locked file per GPU, named by UUID, in the user's runtime folder, for as long as it lives.
One process chooses at a time, so two runs never take halves of the same set.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from filelock import BaseFileLock, FileLock, Timeout

from everygpu.devices.nvml import DeviceSample
from everygpu.folders import runtime_folder, write_whole

logger = logging.getLogger("everygpu")
OWN = "EVERYGPU_RESERVED"
"""Variable by which the processes that a run starts know its GPUs for their own: UUIDs, with commas."""
_TURN_S = 10.0  # choosing takes milliseconds; a process suspended in the middle of it must not block all others


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The run that has reserved a GPU, as it described itself."""

    pid: int | None
    command: str | None

    @property
    def reason(self) -> str:
        """Why the GPU can't be had, for a table."""
        by = "another run" if self.pid is None else f"process {self.pid}"
        return f"reserved by {by}" + (f" ({self.command})" if self.command else "")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices, and the locks that keep other runs off them; the system releases them when the process ends."""

    devices: list[DeviceSample]
    locks: tuple[BaseFileLock, ...]

    def release(self) -> None:
        """Let other runs have them."""
        for lock in self.locks:
            lock.release()


def reserve(select: Callable[[Mapping[str, Holder]], list[DeviceSample]]) -> Reservation:
    """Call ``select`` with the UUIDs that other runs hold, while no other run selects, and lock its choice."""
    with _turn() as folder:
        if folder is None:
            return Reservation(select({}), ())
        devices = select(_read_holders(folder, os.environ))
        locks = [_hold(folder, device.uuid) for device in devices if device.uuid]
        return Reservation(devices, tuple(lock for lock in locks if lock is not None))


def find_holders(environ: Mapping[str, str] | None = None) -> dict[str, Holder]:
    """Say which GPUs other runs have reserved, by UUID; those of the run that started this process are its own."""
    with _turn() as folder:
        return {} if folder is None else _read_holders(folder, os.environ if environ is None else environ)


@contextmanager
def _turn() -> Iterator[Path | None]:
    """Hold the right to choose; gives the folder of the locks, or None where files can't be locked."""
    lock = None
    folder: Path | None = None
    try:
        folder = runtime_folder() / "reserved"
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = FileLock(folder / "choosing", timeout=_TURN_S, mode=0o600)
        lock.acquire()
    except Timeout:
        logger.warning("Another run has been choosing GPUs for %g s: not waiting for it any longer.", _TURN_S)
    except OSError as error:
        logger.warning("GPUs can't be reserved (%s): other runs may choose the same ones.", error)
        folder = None
    try:
        yield folder
    finally:
        if lock is not None:
            lock.release()


def _read_holders(folder: Path, environ: Mapping[str, str]) -> dict[str, Holder]:
    own = environ.get(OWN, "").split(",")
    paths = {unquote(path.stem): path for path in folder.glob("*.lock")}
    return {uuid: _read_holder(path) for uuid, path in paths.items() if uuid not in own and _is_held(path)}


def _is_held(path: Path) -> bool:
    try:
        with FileLock(path, timeout=0, mode=0o600):
            return False
    except Timeout:
        return True
    except OSError as error:  # a link, a pipe or another user's file reserves nothing
        logger.debug("No reservation is read: %s.", error)
        return False


def _read_holder(path: Path) -> Holder:
    try:
        written = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return Holder(pid=int(written["pid"]), command=str(written["command"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return Holder(pid=None, command=None)


def _hold(folder: Path, uuid: str) -> BaseFileLock | None:
    path = folder / f"{quote(uuid, safe='')}.lock"  # the UUIDs of old MIG instances have slashes
    lock = FileLock(path, timeout=0, mode=0o600)
    try:
        lock.acquire()
        # A separate file: trying a lock truncates the lock's own file.
        write_whole(path.with_suffix(".json"), json.dumps({"pid": os.getpid(), "command": name_command()}))
    except Timeout:  # a process inside a run reserves what the run holds already
        return None
    except OSError as error:
        logger.warning("%s can't be reserved (%s): other runs may choose it.", uuid, error)
    return lock if lock.is_locked else None


def name_command() -> str:
    """Name what this process runs, for the tables of others: its script, else its program."""
    names = [os.path.basename(word) for word in sys.argv]
    scripts = [name for name in names if name.endswith(".py") and name != "__main__.py"]
    return scripts[0] if scripts else (names or ["python"])[0]
