"""How a rank sees that another one lives, and what it reads there.

Each rank has a ``TCPStore`` of its own, and others ask it. A thread in C++ answers, which needs no GIL: a rank that
compiles, or is long in a call, answers; one that is stopped doesn't, and the connection to one that is dead breaks.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from everygpu.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

PERIOD_S = 0.25
CONNECT_S = 30.0
ENDED, FAILURE = "ended", "failure"


class Peer(NamedTuple):
    """A rank, as others name and reach it."""

    rank: int
    host: str
    pid: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


def serve(rank: int) -> tuple["TCPStore", Peer]:
    """Begin to answer other ranks."""
    store = _open("localhost", 0, is_master=True)
    return store, Peer(rank, socket.gethostname(), os.getpid(), _own_address(rank), store.port)


def connect(peer: Peer) -> "TCPStore":
    """Open a connection to a rank; one that waits for an answer holds up no other.

    Raises:
        RankError: it can't be reached.
    """
    try:
        return _open(peer.address, peer.port, is_master=False)
    except RuntimeError as cause:
        raise RankError(
            f"ranks: every rank must be reachable by the others, got no connection to {peer} at {peer.address}, port "
            f"{peer.port}. Let the boxes reach each other at any port, and set MASTER_ADDR to a name of rank 0's box "
            f"that all of them know."
        ) from cause


def _open(address: str, port: int, *, is_master: bool) -> "TCPStore":
    limit = timedelta(seconds=CONNECT_S)
    store: TCPStore = getattr(dist, "TCPStore")(  # noqa: B009 - torch documents it, and leaves it out of its types
        address, port, is_master=is_master, wait_for_workers=False, timeout=limit
    )
    return store


def _own_address(rank: int) -> str:
    """Return the address under which the rank that ``MASTER_ADDR`` names, and others beside it, reach this one."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return socket.gethostname()
    if rank == 0:
        return master
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # chooses the interface, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


class Ping:
    """Asks a rank again and again, in a thread, whether it lives, has ended, or knows of a failure.

    Args:
        peer: The rank that is asked.
        goodbye: Keys that are set there when it stops.
        over: Set when it is to stop.
        on_failure: Called with what the rank knows of a failure.
    """

    def __init__(
        self, peer: Peer, goodbye: Sequence[str], over: threading.Event, on_failure: Callable[[bytes], object]
    ) -> None:
        self.peer = peer
        self.answered_at = time.monotonic()
        self.is_off = False
        """Whether it asks no more: the rank has ended as it should, or it is over."""
        self.error: RuntimeError | None = None
        """What broke the connection."""
        self._goodbye, self._over, self._on_failure = goodbye, over, on_failure
        self._store = connect(peer)
        self.thread = threading.Thread(target=self._ask, name=f"everygpu-rank-{peer.rank}", daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        try:
            while not (self._look() or self._over.wait(PERIOD_S)):
                pass
            for key in self._goodbye:
                self._store.set(key, "")
            self.is_off = True
        except RuntimeError as error:
            self.error = error

    def _look(self) -> bool:
        if self._store.check([FAILURE]):
            self._on_failure(self._store.get(FAILURE))
            return True
        has_ended = bool(self._store.check([ENDED]))
        self.answered_at = time.monotonic()
        return has_ended


def off_key(rank: int) -> str:
    """Name what a rank leaves with the one that it no longer asks."""
    return f"off/{rank}"
