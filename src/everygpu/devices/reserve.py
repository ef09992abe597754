"""Keep two runs that start together from choosing the same GPU.

A run holds a locked file per GPU, named by UUID, in the user's runtime folder, for as long as it lives.
One process chooses at a time, so two runs never take halves of the same set.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote, unquote

from everygpu.folders import read_json, runtime_folder
from everygpu.locks import Lock, is_locked, try_lock, wait_for_lock

logger = logging.getLogger("everygpu")
OWN = "EVERYGPU_RESERVED"
"""Variable by which the processes that a run starts know its GPUs for their own: UUIDs, with commas."""
_TURN_S = 10.0  # choosing takes milliseconds; a process suspended in the middle of it must not block all others


class Named(Protocol):
    """What can be reserved: ``DeviceSample`` and ``VisibleDevice`` both can."""

    @property
    def uuid(self) -> str | None: ...


AnyNamed = TypeVar("AnyNamed", bound=Named)


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
class Reservation(Generic[AnyNamed]):
    """Devices, and the locks that keep other runs off them."""

    devices: list[AnyNamed]
    locks: tuple[Lock, ...]

    def release(self) -> None:
        """Let other runs have them."""
        for lock in self.locks:
            lock.release()


def reserve(select: Callable[[Mapping[str, Holder]], list[AnyNamed]]) -> Reservation[AnyNamed]:
    """Choose devices and reserve them, while no other run chooses.

    Args:
        select: Gets the holders of what is reserved, by UUID, and returns devices without them; it should
            ask the driver anew. What it raises goes through, and then nothing is reserved.
    Returns:
        The devices, with one lock each. Without locks, and with a line in the log, where files can't be
        locked.
    """
    folder = _folder()
    if folder is None:
        return Reservation(select({}), ())
    with _turn(folder):
        devices = select(_read_holders(folder, os.environ))
        return Reservation(devices, tuple(_hold(folder, [d.uuid for d in devices if d.uuid])))


def find_holders(environ: Mapping[str, str] | None = None) -> dict[str, Holder]:
    """Say which GPUs other runs have reserved.

    Args:
        environ: As ``os.environ``; the GPUs of the run that started this process are its own.
    Returns:
        Holders by UUID; empty where files can't be locked.
    """
    folder = _folder()
    if folder is None:
        return {}
    with _turn(folder):
        return _read_holders(folder, os.environ if environ is None else environ)


def _folder() -> Path | None:
    """Make the folder of the locks, and see that its file system has locks."""
    try:
        folder = runtime_folder() / "reserved"
        folder.mkdir(mode=0o700, exist_ok=True)
        probe = try_lock(folder / "probe")
        if probe is not None:
            probe.release()
    except OSError as error:
        logger.warning("GPUs can't be reserved (%s): other runs may choose the same ones.", error)
        return None
    return folder


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Hold the right to choose."""
    try:
        lock = wait_for_lock(folder / "choosing", _TURN_S)
        if lock is None:
            logger.warning("Another run has been choosing GPUs for %g s: not waiting for it any longer.", _TURN_S)
    except OSError as error:
        logger.warning("Runs that start together may choose the same GPUs: %s.", error)
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _read_holders(folder: Path, environ: Mapping[str, str]) -> dict[str, Holder]:
    own = environ.get(OWN, "").split(",")
    paths = {unquote(path.stem): path for path in folder.glob("*.lock")}
    return {uuid: _read_holder(path) for uuid, path in paths.items() if uuid not in own and _is_held(path)}


def _is_held(path: Path) -> bool:
    try:
        return is_locked(path)
    except OSError as error:  # a link, a pipe or another user's file reserves nothing
        logger.debug("No reservation is read: %s.", error)
        return False


def _read_holder(path: Path) -> Holder:
    try:
        told = read_json(path)
        return Holder(pid=int(told["pid"]), command=str(told["command"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return Holder(pid=None, command=None)


def _hold(folder: Path, uuids: Sequence[str]) -> Iterator[Lock]:
    text = json.dumps({"pid": os.getpid(), "command": name_command()})
    for uuid in uuids:
        # The UUIDs of old MIG instances have slashes.
        try:
            lock = try_lock(folder / f"{quote(uuid, safe='')}.lock")
        except OSError as error:
            logger.warning("%s can't be reserved (%s): other runs may choose it.", uuid, error)
            continue
        if lock is not None:  # a process inside a run reserves what the run holds already
            lock.write(text)
            yield lock


def name_command() -> str:
    """Name what this process runs, for the tables of others: its script, else its program."""
    names = [os.path.basename(word) for word in sys.argv]
    scripts = [name for name in names if name.endswith(".py") and name != "__main__.py"]
    return scripts[0] if scripts else (names or ["python"])[0]
