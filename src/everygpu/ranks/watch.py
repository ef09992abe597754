"""Ends all ranks when one of them has failed: by an error, or because it was killed or stopped.

Rank 0's store has the news: the first failure, told by the rank itself or by the one that watches it. All ranks read
it. Rank 0 is watched by all, each other rank by the one before it.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from everygpu.errors import RankError
from everygpu.progress import SAVING_S, is_saving
from everygpu.ranks.peers import ENDED, FAILURE, PERIOD_S, Peer, Ping, connect, off_key

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

SILENT_S = 5.0
"""A rank that has not answered for this long is taken for dead."""
ASLEEP_S = 1.5
"""A rank whose watch itself has not run for this long was stopped, or busy: it counts anew."""
GRACE_S = 1.5
"""A script has this long to reach a call of ours, which raises, until its process is ended."""
LEAVE_S, LEAVE_FAILED_S = 5.0, 1.0
"""A rank waits no longer at its end for those that watch it."""
BROKEN_S = SILENT_S + 2 * PERIOD_S
"""After a collective has failed, the reason is known within this time, if another rank is it."""


class Failure(NamedTuple):
    """What has ended the run."""

    told_by: int | None
    """The rank that had the error; None for one that was found dead."""
    message: str


class Watch:
    """Looks after the other ranks, and tells them of a failure here; from ``join`` to the process's end.

    Args:
        rank: This process's.
        peers: All ranks.
        own: This rank's store.
    """

    def __init__(self, rank: int, peers: Sequence[Peer], own: "TCPStore") -> None:
        self.rank = rank
        self.failure: Failure | None = None
        self.news = connect(peers[0])
        self._pid = os.getpid()
        self._own, self._me, self._peers = own, peers[rank], list(peers)
        self._is_delivered = False
        self._left, self._over, self._heard = threading.Event(), threading.Event(), threading.Event()
        others = [peer.rank for peer in peers if peer.rank != rank]
        self._watched_by = others if rank == 0 else [rank - 1]
        # Rank 0 is told too, for a rank that comes too late to read it here; by a thread, as it may not answer.
        goodbyes = {(rank + 1) % len(peers): [off_key(rank)]} | {0: [off_key(rank), _ended_key(rank)]}
        self._pings = [Ping(peers[t], keys, self._over, self._hear) for t, keys in sorted(goodbyes.items())]
        self._hook = sys.excepthook
        sys.excepthook = self._excepthook
        self._thread = threading.Thread(target=self._judge, name="everygpu-ranks", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what another rank, or this one, has failed with."""
        if self.failure is not None:
            raise self._deliver(self.failure)

    def reason_of(self, error: BaseException) -> RankError | None:
        """Return the failure, or the early end, of another rank that an error here is the consequence of."""
        if not _is_of_communication(error) or os.getpid() != self._pid:
            return None
        if not self._heard.wait(BROKEN_S):
            self._tell_of_an_end()
        return self._deliver(self.failure) if self.failure is not None else None

    def tell(self, error: BaseException, device: "torch.device | str | None" = None) -> None:
        """Tell all ranks of an error here, if none has failed before."""
        if self.failure is not None or os.getpid() != self._pid:
            return
        text = "".join(traceback.format_exception(error)).rstrip()
        place = f"{self._me}" if device is None else f"{self._me}, device {device}"
        name = f"{type(error).__name__}: {error}".splitlines()[0]
        message = f"ranks: every rank must go on without an error, got one on {place}: {name}\n\n{text}"
        self._announce(Failure(self.rank, message))

    def has_ended(self, peer_rank: int) -> bool:
        """Tell whether a rank that this one watches, as all watch rank 0, has said goodbye."""
        return any(ping.is_off and ping.peer.rank == peer_rank for ping in self._pings)

    def leave(self) -> None:
        """Say goodbye, and stop: a rank that ends without it has failed."""
        if self._left.is_set() or os.getpid() != self._pid:
            return
        self._left.set()
        self._over.set()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        limit_s = LEAVE_S
        if self.failure is not None:
            limit_s = LEAVE_FAILED_S
            # What is stuck with the device or the other ranks must not hold up the process's end.
            with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
                faulthandler.dump_traceback_later(LEAVE_S, exit=True)
        limit = time.monotonic() + limit_s
        with contextlib.suppress(RuntimeError):
            self._own.set(ENDED, "")
            keys = [off_key(rank) for rank in self._watched_by]
            while not self._own.check(keys) and time.monotonic() < limit and not any(p.error for p in self._pings):
                time.sleep(PERIOD_S / 20)
        self._join_threads(limit)

    def _join_threads(self, limit: float) -> None:
        """Wait for threads that ask stores: one whose answer comes while the interpreter ends would abort the process.

        Those that ask a rank that doesn't answer stay: they stay asking until the process is gone.
        """
        if any(time.monotonic() - ping.answered_at < ASLEEP_S for ping in self._pings):
            limit = max(limit, time.monotonic() + LEAVE_FAILED_S)
        for thread in (*(ping.thread for ping in self._pings), self._thread):
            thread.join(max(0.0, limit - time.monotonic()))

    def _deliver(self, failure: Failure) -> RankError:
        self._is_delivered = True
        return RankError(failure.message)

    def _hear(self, news: bytes) -> None:
        self.failure = self.failure or Failure(*json.loads(news))
        self._heard.set()
        self._over.set()

    def _announce(self, failure: Failure) -> None:
        """Write a failure down where all ranks read it, if it is the first; take the first for the reason here."""
        text = json.dumps(failure)
        try:
            self._hear(self.news.compare_set(FAILURE, "", text))
        except RuntimeError:  # rank 0 is gone, and the others see it by themselves
            self._hear(text.encode())

    def _judge(self) -> None:
        awake_at = time.monotonic()
        while not self._over.wait(PERIOD_S):
            now = time.monotonic()
            if now - awake_at > ASLEEP_S:
                for ping in self._pings:
                    ping.answered_at = now
            awake_at = now
            for ping in self._pings:
                self._judge_one(ping, now)
        if self.failure is not None and self.failure.told_by != self.rank:
            self._end(self.failure)

    def _judge_one(self, ping: Ping, now: float) -> None:
        silent = now - ping.answered_at > SILENT_S
        if ping.is_off or not (silent or ping.error) or self.failure is not None:
            return
        what = f"no sign of life for {SILENT_S:g} s from" if silent else "a sudden end of"
        message = (
            f"ranks: every rank must live as long as the run, got {what} {ping.peer}. Its own output, or the log of "
            f"its box, says why (killed for memory, stopped, a crash); start the run again from its newest checkpoint."
        )
        if ping.peer.rank == 0:
            self._hear(json.dumps(Failure(None, message)).encode())
        elif now - self._pings[0].answered_at < 2 * PERIOD_S and not self._said_goodbye(ping.peer):
            # Where rank 0 doesn't answer, it is judged first: asking it would not return.
            self._announce(Failure(None, message))

    def _tell_of_an_end(self) -> None:
        """Tell all ranks, which wait for each other, of one that has ended without an error, if there is one."""
        ended = next((peer for peer in self._peers if self._has_left(peer)), None)
        if ended is not None:
            message = (
                f"ranks: every rank must make the same calls until its end, got the end of {ended} while {self._me} "
                f"waits for it. Let no rank by itself leave the script, or skip a backward after an error."
            )
            self._announce(Failure(self.rank, message))

    def _has_left(self, peer: Peer) -> bool:
        return peer.rank != self.rank and (self.has_ended(peer.rank) or self._said_goodbye(peer))

    def _said_goodbye(self, peer: Peer) -> bool:
        try:
            return bool(self.news.check([_ended_key(peer.rank)]))
        except RuntimeError:
            return False

    def _end(self, failure: Failure) -> None:
        """End the process, unless its script has seen the failure, and ends by itself."""
        heard_at = time.monotonic()
        limit = heard_at + GRACE_S
        while not self._left.wait(PERIOD_S):
            now = time.monotonic()
            if self._is_delivered and threading.main_thread().is_alive():
                limit = now + LEAVE_S
            elif now > limit and not (is_saving() and now < heard_at + SAVING_S):
                self._exit(failure)

    def _exit(self, failure: Failure) -> None:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a stream may be closed, or none
            if not self._is_delivered:
                name = f"{RankError.__module__}.{RankError.__qualname__}"
                sys.stderr.write(f"rank {self.rank} on {self._me.host} ends: {name}: {failure.message}\n")
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(1)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        reason = self.reason_of(error)
        if reason is None:
            self.tell(error)
            self._hook(kind, error, trace)
            return
        reason.__cause__ = error
        self._hook(RankError, reason, None)


def _ended_key(rank: int) -> str:
    return f"{ENDED}/{rank}"


def _is_of_communication(error: BaseException) -> bool:
    """Tell an error that the end of another rank can bring about; gloo's have no type of their own."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))
