"""SHA-256 of files in chunks, so that several cores can hash one file while it is written or read.

A file's digests are those of its consecutive chunks of `CHUNK_BYTES`, the last one shorter; an empty file has
none. One digest over the whole file would tie a save to the speed of one core, half a gigabyte a second
where the processor has no instructions for SHA.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from everygpu.checkpoint.regular_file import open_regular

CHUNK_BYTES = 8 * 2**20
"""Part of the format: every reader must cut where the writer did."""

MAX_WRITERS = 4
"""For writing: each holds one chunk, and more would need more than 64 MiB beside the state."""

MAX_READERS = 16
"""For reading: each holds one piece of `_PIECE_BYTES` only."""

_PIECE_BYTES = 256 * 2**10

_P = ParamSpec("_P")
_T = TypeVar("_T")


class HashingPool(Executor):
    """Threads for hashing: the interpreter's lock is free while they hash, read and write.

    ``concurrent.futures.ThreadPoolExecutor`` takes no work once the main thread has ended, and the last checkpoint of
    a script is written then. Where no thread can be begun, as at the interpreter's very end, `submit` does the work.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = min(max_threads, os.cpu_count() or 1)
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have work done; the result says when."""
        future: Future[_T] = Future()

        def fulfil() -> None:
            try:
                future.set_result(work(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
                future.set_exception(error)

        if len(self._threads) < self._max_threads:
            self._add_thread()
        if self._threads:
            self._queue.put(fulfil)
        else:
            fulfil()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when the work is done."""
        for _ in self._threads:
            self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _add_thread(self) -> None:
        # A daemon, so that a pool whose end was interrupted doesn't keep the interpreter from ending.
        thread = threading.Thread(target=self._work, name="everygpu-hash", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, for now or for good
            return
        self._threads.append(thread)

    def _work(self) -> None:
        while (fulfil := self._queue.get()) is not None:
            fulfil()


def hash_files(sizes: Iterable[tuple[Path, int]]) -> list[tuple[str, ...]]:
    """Return the digests of the chunks of each file.

    Args:
        sizes: Files, and how many bytes of each to hash; of a shorter one, what is there is hashed.
    Raises:
        OSError: a file can't be read.
    """
    with HashingPool(MAX_READERS) as pool:
        running = [
            [pool.submit(hash_chunk, path, begin) for begin in range(0, size_bytes, CHUNK_BYTES)]
            for path, size_bytes in sizes
        ]
        return [tuple(chunk.result() for chunk in chunks) for chunks in running]


def hash_chunk(path: Path, begin: int) -> str:
    """Return the digest of the chunk that begins at an offset."""
    with open_regular(path) as file:
        file.seek(begin)
        # Small pieces into the same memory: fresh memory for each chunk costs more time than hashing it.
        digest, piece, rest = sha256(), memoryview(bytearray(_PIECE_BYTES)), CHUNK_BYTES
        while count := file.readinto(piece[:rest]):
            digest.update(piece[:count])
            rest -= count
        return digest.hexdigest()
