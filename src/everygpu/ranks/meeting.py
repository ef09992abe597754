"""Where ranks meet that torchrun has started: a store in which nothing is left of a try before a restart."""

import os
import time
from secrets import token_hex
from typing import TYPE_CHECKING

import torch.distributed as dist

from everygpu.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

MEETING_S = 1800.0
"""How long rank 0 waits for the others: as ``init_process_group`` does."""
_POLL_S = 0.01


def open_store() -> "Store":
    """Open the store that the environment names.

    torchrun keeps one for all tries, with the addresses of processes that are gone: a process group that is made in it
    after a restart connects to these. Here the ranks of one try agree on a prefix that no other has.

    Source:
        ``init_method="env://"``; torch 2.13 says that each retry has a new store, and shares that of the rendezvous.
    """
    found: tuple[Store, int, int] = next(getattr(dist, "rendezvous")("env://"))  # noqa: B009 - as in peers
    store, rank, size = found
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    prefix = _hand_out(store, size) if rank == 0 else _ask(store, rank)
    own: Store = getattr(dist, "PrefixStore")(prefix, store)  # noqa: B009 - as in peers
    return own


def _hand_out(store: "Store", size: int) -> str:
    prefix = token_hex(8)
    missing = set(range(1, size))
    limit = time.monotonic() + MEETING_S
    while missing:
        if time.monotonic() > limit:
            raise RankError(
                f"ranks: all of {size} ranks must join within {MEETING_S:g} s, got none of rank {min(missing)}. "
                f"Have every rank run the same script."
            )
        for rank in sorted(missing):
            if store.check([_asked(rank)]):  # now, or in a try before, which does no harm
                store.set(_answer(store.get(_asked(rank)).decode()), prefix)
        missing -= {rank for rank in missing if store.check([_heard(prefix, rank)])}
        time.sleep(_POLL_S)
    return prefix


def _ask(store: "Store", rank: int) -> str:
    question = token_hex(8)
    store.set(_asked(rank), question)
    prefix = str(store.get(_answer(question)).decode())
    store.set(_heard(prefix, rank), "")
    return prefix


def _asked(rank: int) -> str:
    return f"everygpu/asked/{rank}"


def _answer(question: str) -> str:
    return f"everygpu/answer/{question}"


def _heard(prefix: str, rank: int) -> str:
    return f"everygpu/heard/{prefix}/{rank}"
