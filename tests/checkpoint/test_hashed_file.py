"""Files hashed while they are written: what is on the disk is what was hashed, whatever the pieces."""

import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everygpu.checkpoint import digests, hashed_file
from everygpu.checkpoint.digests import hash_files
from everygpu.checkpoint.hashed_file import new_hashed_file


@given(pieces=st.lists(st.binary(max_size=40), max_size=8), num_threads=st.integers(1, 3))
def test_any_pieces_give_the_file_and_its_digests(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], num_threads: int
) -> None:
    path, whole = tmp_path_factory.mktemp("pieces") / "file", b"".join(pieces)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(digests, "CHUNK_BYTES", 16)
        monkeypatch.setattr(hashed_file, "CHUNK_BYTES", 16)
        with ThreadPoolExecutor(num_threads) as pool, new_hashed_file(path, pool) as file:
            for piece in pieces:
                file.write(piece)
            record = file.finish()
        chunks = [whole[begin : begin + 16] for begin in range(0, len(whole), 16)]
        assert path.read_bytes() == whole
        assert record.size_bytes == len(whole)
        assert record.sha256 == tuple(sha256(chunk).hexdigest() for chunk in chunks)
        assert hash_files([(path, len(whole))]) == [record.sha256]


def test_a_write_that_fails_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_file, "CHUNK_BYTES", 4)

    def write_to_nothing() -> None:
        with ThreadPoolExecutor(2) as pool, new_hashed_file(tmp_path / "file", pool) as file:
            os.unlink(tmp_path / "file")
            for _ in range(20):
                file.write(b"12345678")
            file.finish()

    with pytest.raises(FileNotFoundError):
        write_to_nothing()


def test_few_chunks_wait_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds the memory of a save."""
    monkeypatch.setattr(hashed_file, "CHUNK_BYTES", 4)
    submitted, most = [], 0

    class Pool(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):
            nonlocal most
            future = super().submit(*args, **kwargs)
            submitted.append(future)
            most = max(most, sum(not f.done() for f in submitted))
            return future

    with Pool(1) as pool, new_hashed_file(tmp_path / "file", pool) as file:
        for _ in range(200):
            file.write(b"1234")
        file.finish()
    assert len(submitted) == 200
    assert 1 <= most <= digests.MAX_WRITERS
