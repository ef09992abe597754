"""SHA-256 of files in chunks, so that several cores can hash one file while it is written or read.

A file's digests are those of its consecutive chunks of `CHUNK_BYTES`, the last one shorter; an empty file has
none. One digest over the whole file would tie a save to the speed of one core, half a gigabyte a second
where the processor has no instructions for SHA.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

CHUNK_BYTES = 8 * 2**20
"""Part of the format: every reader must cut where the writer did."""

MAX_WRITERS = 4
"""For writing: each holds one chunk, and more would need more than 64 MiB beside the state."""

MAX_READERS = 16
"""For reading: each holds one piece of `_PIECE_BYTES` only."""

_PIECE_BYTES = 256 * 2**10


def hashing_pool(max_threads: int) -> ThreadPoolExecutor:
    """Make threads for hashing: the interpreter's lock is free while they hash, read and write."""
    return ThreadPoolExecutor(min(max_threads, os.cpu_count() or 1), "everygpu-hash")


def hash_files(sizes: Iterable[tuple[Path, int]]) -> list[tuple[str, ...]]:
    """Return the digests of the chunks of each file.

    Args:
        sizes: Files, and how many bytes of each to hash; of a shorter one, what is there is hashed.
    Raises:
        OSError: a file can't be read.
    """
    with hashing_pool(MAX_READERS) as pool:
        running = [
            [pool.submit(hash_chunk, path, begin) for begin in range(0, size_bytes, CHUNK_BYTES)]
            for path, size_bytes in sizes
        ]
        return [tuple(chunk.result() for chunk in chunks) for chunks in running]


def hash_chunk(path: Path, begin: int) -> str:
    """Return the digest of the chunk that begins at an offset."""
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        # Small pieces into the same memory: fresh memory for each chunk costs more time than hashing it.
        digest, piece, rest = sha256(), memoryview(bytearray(_PIECE_BYTES)), CHUNK_BYTES
        while count := file.readinto(piece[:rest]):
            digest.update(piece[:count])
            rest -= count
        return digest.hexdigest()
