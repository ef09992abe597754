"""The files of a checkpoint, and how a directory and its files are recognized as everygpu's.

``model.safetensors`` and ``training.safetensors`` hold the tensors, in shards with an index if they are larger than
5 GB. ``checkpoint.json`` holds the format, the structure of all other values, and the checkpoint's position in its run.
``SHA256SUMS`` is written last, so that ``sha256sum -c`` verifies a checkpoint without everygpu. If a save was cut off
between the renames that move its files into place, the remaining ones are in the directory `PENDING`.
"""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from everygpu.checkpoint.values import DTYPES, cut, dtype_name, is_utf8
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError, CheckpointNotFoundError

FORMAT, VERSION = "everygpu", 1
DOCUMENT, SUMS = "checkpoint.json", "SHA256SUMS"
MODEL, TRAINING = "model", "training"
PENDING = ".everygpu"
"""In a checkpoint's directory: files of a complete save that are still to be put in place."""
SHARD_BYTES = 5 * 10**9

_HEAD = re.compile(rb'\s*\{\s*"format":\s*"everygpu"')
_TENSOR_FILE = re.compile(r"(model|training)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_SUM = re.compile(r"([0-9a-f]{64})  ([^/\n]+)\n")
_PIECE_BYTES = 2**20
_THREADS = 4

Files = Mapping[str, Mapping[str, Tensor]]
"""Tensors by the names of their files, and by their own."""
Advance = Callable[[int], object]
"""Called with the number of bytes that were read since the last call."""
_T = TypeVar("_T")


def is_marked(directory: Path) -> bool:
    """Whether the ``checkpoint.json`` of a directory names our format; the others in it may be damaged."""
    with suppress(CheckpointDamagedError), opened(directory / DOCUMENT) as file:
        return _HEAD.match(file.read(100)) is not None
    return False


def is_pending(directory: Path) -> bool:
    """Whether a complete save has files that are still to be put in place."""
    return is_marked(directory / PENDING) and not (directory / PENDING).is_symlink()


def is_ours(path: Path) -> bool:
    """Whether a directory is a checkpoint of everygpu, intact or damaged."""
    return is_marked(path) or is_pending(path)


def is_claimed(path: Path) -> bool:
    """Whether to read a directory as ours: also one without a readable ``checkpoint.json``, which is an error then."""
    if locate(path, DOCUMENT).exists():
        return True
    with suppress(CheckpointDamagedError):
        return DOCUMENT in _read_sums(path)[0]
    return False


def locate(directory: Path, name: str) -> Path:
    """Return where a file of a checkpoint is."""
    pending = directory / PENDING / name
    return pending if is_pending(directory) and pending.exists() else directory / name


def files_in(directory: Path) -> set[str]:
    """Name the files that the checkpoint in a directory lists as its own; all others belong to other programs."""
    if not is_marked(directory):
        return set()
    names: set[str] = set()
    with suppress(CheckpointDamagedError):
        document = read_json(directory / DOCUMENT)
        names |= set(document["files"] if isinstance(document.get("files"), dict) else ())
    with suppress(CheckpointDamagedError):
        names |= _read_sums(directory)[0].keys()
    return {DOCUMENT, SUMS, *filter(_TENSOR_FILE.fullmatch, names)}


def files_of(tensors: Files, num_writers: int = 1) -> dict[str, dict[str, Tensor]]:
    """Distribute tensors over files of up to 5 GB, or one tensor; at least as many files as writers."""
    total = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    limit = min(SHARD_BYTES, -(-total // num_writers))
    files: dict[str, dict[str, Tensor]] = {}
    for stem, group in tensors.items():
        shards: list[dict[str, Tensor]] = [{}]
        num_bytes = 0
        for name, tensor in group.items():
            if shards[-1] and num_bytes + tensor.nbytes > limit:
                shards.append({})
                num_bytes = 0
            shards[-1][name] = tensor
            num_bytes += tensor.nbytes
        of = f"-of-{len(shards):05d}"
        files |= {f"{stem}{f'-{i:05d}{of}' if shards[1:] else ''}.safetensors": s for i, s in enumerate(shards, 1)}
    return files


def write_tensors(directory: Path, files: Files) -> dict[str, str]:
    """Write files of tensors, several at a time; return the digest of each."""
    return dict(zip(files, side_by_side([partial(write_safetensors, directory / file, files[file]) for file in files])))


def write_document(directory: Path, files: Files, digests: Mapping[str, str], document: Mapping[str, Any]) -> None:
    """Write what belongs to all files of tensors: their indexes, ``checkpoint.json`` and ``SHA256SUMS``."""
    digests = dict(digests)

    def write_text(name: str, text: str) -> None:
        new = directory / f".{name}"  # renamed: checkpoint.json marks the directory as ours from its first moment on
        new.write_text(text, encoding="utf-8")
        sync_path(new)
        os.replace(new, directory / name)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()

    for stem in (MODEL, TRAINING):
        if shards := {file: shard for file, shard in files.items() if file.startswith(f"{stem}-")}:
            total = sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())
            weight_map = {name: file for file, shard in shards.items() for name in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}  # as Transformers has it
            write_text(f"{stem}.safetensors.index.json", json.dumps(index, indent=1))
    libraries = {"python": platform.python_version()}
    for name in ("everygpu", "torch", "safetensors", "numpy"):
        with suppress(PackageNotFoundError):
            libraries[name] = version(name)
    sizes = {name: (directory / name).stat().st_size for name in sorted(digests)}
    whole = {"format": FORMAT, "version": VERSION, **document, "libraries": libraries, "files": sizes}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in whole.items())
    write_text(DOCUMENT, f"{{\n{lines}\n}}\n")
    write_text(SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())))


def read_document(directory: Path) -> dict[str, Any]:
    """Read ``checkpoint.json``, and see that the files it lists are there in full size."""
    path = locate(directory, DOCUMENT)
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointForeignError(f'load: {path} has no "format" everygpu. Pass what everygpu.save has written.')
    number, files = document.get("version"), document.get("files")
    if type(number) is not int or number < 1:
        raise damaged(path, "has no version")
    if number > VERSION:
        raise CheckpointForeignError(f"load: {path} has the format version {number}. Upgrade everygpu to read it.")
    if not isinstance(files, dict) or not all(map(_TENSOR_FILE.fullmatch, files)):
        raise damaged(path, "lists files that no checkpoint has")
    for name, num_bytes in files.items():
        with opened(path := locate(directory, name)) as file:
            found = os.fstat(file.fileno()).st_size
        if found != num_bytes:
            raise damaged(path, f"has {found} bytes where {cut(num_bytes)} were written")
    return document


def find_altered(directory: Path, document: Mapping[str, Any], advance: Advance) -> list[CheckpointDamagedError]:
    """Compare every byte of a checkpoint with ``SHA256SUMS``; return what is wrong with each faulty file."""

    def hash_file(name: str) -> str:
        digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
        with opened(locate(directory, name)) as file:
            while count := file.readinto(piece):  # type: ignore[attr-defined]
                digest.update(piece[:count])
                advance(count)
        return digest.hexdigest()

    wanted = {DOCUMENT, *document["files"]}
    sums, num_lines = _read_sums(directory)
    if len(sums) != num_lines or sums.keys() != wanted:
        return [damaged(directory / SUMS, f"doesn't list one digest of each of {', '.join(sorted(wanted))}")]
    found = zip(sorted(sums), side_by_side([partial(hash_file, name) for name in sorted(sums)]))
    what = f"was altered: its SHA-256 is not the one in {SUMS}"
    return [damaged(directory / name, what) for name, digest in found if digest != sums[name]]


def _read_sums(directory: Path) -> tuple[dict[str, str], int]:
    """Read the digests in ``SHA256SUMS`` by the names of their files, and the number of its lines."""
    with opened(locate(directory, SUMS)) as file:
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    return {match[2]: match[1] for line in lines if (match := _SUM.fullmatch(line))}, len(lines)


def read_tensors(directory: Path, document: Mapping[str, Any], stem: str) -> dict[str, Tensor]:
    """Read the tensors of the model or of the training; they may be backed by the files."""
    tensors: dict[str, Tensor] = {}
    for name in document["files"]:
        if name.startswith(stem) and name.endswith(".safetensors"):
            tensors |= read_safetensors(locate(directory, name))
    return tensors


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read one file of tensors, mapped into memory."""
    with opened(path) as file:
        try:
            return load_file(path) if is_utf8(path) else load(file.read())
        except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError) as cause:
            raise damaged(path, f"is no valid safetensors file ({cause})") from cause


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors, one at a time in host memory, as safetensors; return the SHA-256, made in a thread meanwhile."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names, end = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)), 0  # each is aligned so
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        kind, shape = DTYPES[dtype_name(tensors[name])], list(tensors[name].shape)
        if kind == "F4":  # of which torch counts pairs
            shape[-1] *= 2
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(head := len(text).to_bytes(8, "little") + text)
        digest, hashing = hashlib.sha256(head), Thread()
        try:
            for name in names:
                plain = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
                # Of one element, a contiguous tensor may have any stride.
                flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
                piece = memoryview(flat.numpy())  # type: ignore[arg-type]
                _join(hashing)  # no more than two copies at once: the next comes from its GPU while one is hashed
                hashing = Thread(target=digest.update, args=[piece])
                try:
                    hashing.start() if piece.nbytes >= _PIECE_BYTES else hashing.run()
                except RuntimeError:  # no thread can be begun any more, as at the interpreter's end
                    hashing.run()
                file.write(piece)
        finally:
            _join(hashing)
        file.flush()
        os.fsync(file.fileno())
        return digest.hexdigest()


def read_json(path: Path) -> Any:
    """Read a file of JSON, or say that it is damaged."""
    with opened(path) as file:
        text = file.read()
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise damaged(path, f"is no readable JSON ({cause})") from cause


def require_there(path: Path) -> None:
    """Refuse a path at which there is nothing."""
    if not path.exists():
        raise CheckpointNotFoundError(f"load: No checkpoint at {path}. Check the path, or save one first.")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file of a checkpoint, or say that it is damaged; a pipe in its place would have us wait for ever."""
    try:
        if not path.is_file() and path.exists():
            raise OSError(f"{path} is no regular file")
        with open(path, "rb") as file:
            yield file
    except OSError as cause:
        raise damaged(path, f"can't be read ({cause.strerror or cause})") from cause


def side_by_side(works: Iterable[Callable[[], _T]]) -> list[_T]:
    """Do work in threads; one after the other where no thread can be begun any more, as at the interpreter's end."""
    works, pool = list(works), ThreadPoolExecutor(_THREADS)
    try:
        futures = [pool.submit(work) for work in works]
    except RuntimeError:
        pool.shutdown(cancel_futures=True)
        return [work() for work in works]
    try:
        return [future.result() for future in futures]
    finally:  # an interrupt waits for those that have begun
        pool.shutdown(cancel_futures=True)


def damaged(path: Path, what: str) -> CheckpointDamagedError:
    """Say which file is damaged, and how."""
    return CheckpointDamagedError(f"load: {path} {cut(what)}. Nothing was loaded; take an earlier or another copy.")


def sync_path(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable; Windows has no call for the latter."""
    if path.is_dir() and sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _join(thread: Thread) -> None:
    if thread.ident is not None:
        thread.join()
