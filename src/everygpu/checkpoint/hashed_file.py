"""A file that is hashed while it is written."""

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from everygpu.checkpoint.digests import CHUNK_BYTES, MAX_WRITERS
from everygpu.checkpoint.directory import new_file
from everygpu.checkpoint.manifest import FileRecord

_WRITE_BYTES = 2**20
"""Linux keeps what is written at once in one block of memory where it can. A virtual machine gives free blocks of 2 MiB
and more back to its host, and getting them again takes longer than writing: these fit into smaller ones."""

_SYNC_FILE_RANGE_WRITE = 2


class HashedFile:
    """A new file whose chunks are written and hashed by a pool, while the caller prepares the next ones."""

    def __init__(self, path: Path, pool: Executor, check: Callable[[], None] = lambda: None) -> None:
        """Write to an existing, empty file.

        Args:
            path: The file.
            pool: Runs the writing; at most `MAX_WRITERS` chunks wait in it at a time.
            check: Called before each chunk; what it raises ends the writing.
        """
        self._size_bytes = 0
        self._path, self._pool, self._check = path, pool, check
        self._chunk: list[memoryview] = []
        self._chunk_bytes = 0
        self._running: deque[Future[str]] = deque()
        self._digests: list[str] = []

    def write(self, data: Any) -> None:
        """Append data; its memory must not change until `finish` returns.

        Args:
            data: Anything with one-dimensional bytes in memory.
        Raises:
            OSError: an earlier chunk could not be written.
        """
        rest = memoryview(data)
        while len(rest):
            room = CHUNK_BYTES - self._chunk_bytes
            self._chunk.append(rest[:room])
            self._chunk_bytes += len(rest[:room])
            rest = rest[room:]
            if self._chunk_bytes == CHUNK_BYTES:
                self._hand_over()

    def finish(self) -> FileRecord:
        """Wait until everything is written; return the file's size and digests.

        Raises:
            OSError: a chunk could not be written.
        """
        if self._chunk:
            self._hand_over()
        while self._running:
            self._collect()
        return FileRecord(size_bytes=self._size_bytes, sha256=tuple(self._digests))

    def _hand_over(self) -> None:
        self._check()
        while len(self._running) >= MAX_WRITERS:
            self._collect()
        self._running.append(self._pool.submit(_write_chunk, self._path, self._size_bytes, self._chunk))
        self._size_bytes += self._chunk_bytes
        self._chunk, self._chunk_bytes = [], 0

    def _collect(self) -> None:
        self._digests.append(self._running.popleft().result())


@contextmanager
def new_hashed_file(path: Path, pool: Executor, check: Callable[[], None] = lambda: None) -> Iterator[HashedFile]:
    """Open a new file with the permissions that umask leaves; it is on the disk when the block ends.

    The block must call `HashedFile.finish`.
    """
    with new_file(path):
        yield HashedFile(path, pool, check)


def _write_chunk(path: Path, begin: int, pieces: list[memoryview]) -> str:
    digest, num_bytes = sha256(), 0
    with open(path, "r+b") as file:
        file.seek(begin)
        for piece in pieces:
            for first in range(0, len(piece), _WRITE_BYTES):
                part = piece[first : first + _WRITE_BYTES]
                file.write(part)
                digest.update(part)
                num_bytes += len(part)
        file.flush()
        _begin_writing_back(file.fileno(), begin, num_bytes)
    return digest.hexdigest()


def _begin_writing_back(descriptor: int, begin: int, num_bytes: int) -> None:
    """Let the disk work while the rest is written and hashed, so that little is left for the sync at the end.

    Source: Linux' ``sync_file_range``, which the os module lacks. ``posix_fadvise`` would also write back,
        but drop the pages from memory, where a load soon after would find them.
    """
    if sys.platform == "linux":
        call = getattr(ctypes.CDLL(None), "sync_file_range", None)  # not in every C library
        if call is not None:
            call(descriptor, ctypes.c_int64(begin), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)
