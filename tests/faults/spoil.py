"""Checkpoints spoiled on purpose: each reader's file with lies in it that its format makes possible."""

import io
import json
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from everygpu.checkpoint.manifest import seal
from safetensors.torch import save_file

import everygpu
from tests.checkpoint.forge import agree
from tests.faults.pickles import PICKLES

SPARSE_BYTES = 200 * 10**9

_RAW = {
    "@deep-list@": "[" * 100_000 + "]" * 100_000,
    "@deep-dict@": '{"$tuple":[' * 900 + "1" + "]}" * 900,
    "@digits@": "9" * 5000,
    "@twice@": '{"step": 1, "step": "x", "kind": "plain", "kind": 3}',
    "@nan@": "NaN",
    "@infinity@": "-Infinity",
    "@float@": "1e999",
}
"""JSON that Python's writer does not write, by what stands for it."""

_PLAIN = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, -(2**63), 0.5, -1e308),
    *("", "x" * 5000, "\ud800", "\0", "../x", "/etc/passwd", "a" * 300, "caf\u00e9\u202e", "model.safetensors"),
    *([], {}, [[]], [0, 2**62], [2**62, 2**62, 16], [-1], ["a"], {"a": {"a": []}}, [4, 0], [0, 0], [1] * 1000),
    *(f"b{n}" for n in range(3)),
]
_SKELETONS: list[Any] = [
    *({"$tensor": "w"}, {"$array": "w"}, {"$array": []}, {"$float": "@digits@"}, {"$float": 1}, {"$bytes": "!"}),
    *({"$complex": [10**400, 0]}, {"$complex": [1]}, {"$dict": [[[], 1]]}, {"$dict": 1}, {"$counter": [["a", "b"]]}),
    *(
        {"$unknown": 1},
        {"$tuple": "abc"},
        {"$ordered": [[1]]},
        {"$bytes": "A" * 4001},
        {"$dict": [[{"$tuple": []}, 1]]},
    ),
]

Chance = random.Random


def odd_value(chance: Chance) -> Any:
    return chance.choice([chance.choice(_PLAIN), chance.choice(list(_RAW)), chance.choice(_SKELETONS)])


def spoil_json(document: Any, chance: Chance) -> str:
    """Change, remove, add or double a few values anywhere in a document."""
    for _ in range(chance.choice([1, 1, 2, 5])):
        document = _spoil_value(document, chance)
    text = json.dumps(document)
    for mark, raw in _RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text


def _spoil_value(value: Any, chance: Chance) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return odd_value(chance)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = chance.choice(keys)
    copy = value.copy()
    action = chance.random()
    if action < 0.1:
        del copy[key]
    elif action < 0.2 and isinstance(copy, dict):
        copy[chance.choice(["$tensor", "", "x", "$tuple", "b0"])] = odd_value(chance)
    elif action < 0.25 and isinstance(copy, list):
        copy = copy * chance.choice([2, 100])
    else:
        copy[key] = _spoil_value(value[key], chance)
    return copy


def spoil_bytes(data: bytes, chance: Chance) -> bytes:
    """Flip, cut, repeat, remove or overwrite a part."""
    begin = chance.randrange(len(data) + 1)
    end = min(len(data), begin + chance.choice([1, 1, 2, 4, 8, 64, 1000]))
    kinds = [
        lambda: data[:begin],
        lambda: data[:begin] + bytes(byte ^ (1 << chance.randrange(8)) for byte in data[begin:end]) + data[end:],
        lambda: data[:begin] + data[end:],
        lambda: data[:end] + data[begin:],
        lambda: data[:begin] + b"\xff" * (end - begin) + data[end:],
        lambda: data[:begin] + bytes(end - begin) + data[end:],
        lambda: data[:begin] + chance.choice(PICKLES) + data[end:],
    ]
    return chance.choice(kinds)()


def spoil_place(path: Path, chance: Chance) -> None:
    """Put something in a file's place that is no file, or one whose size is a lie."""
    path.unlink()
    kind = chance.choice(["pipe", "directory", "zero", "loop", "nowhere", "sparse", "empty", "stdin"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.write(chance.choice([b"", b"{", b"PK\x03\x04", b"\x80\x02", b"\x10" + b"\0" * 7 + b"{"]))
            file.truncate(SPARSE_BYTES)
    elif kind == "empty":
        path.touch()
    else:
        targets = {"zero": "/dev/zero", "loop": path.name, "nowhere": "gone", "stdin": "/dev/stdin"}
        path.symlink_to(targets[kind])


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"weight": torch.arange(6.0).view(2, 3), "bias": torch.zeros(2)}


class Spoiler:
    """Makes the spoiled checkpoints of one reader, one after another in the same directory."""

    def __init__(self, directory: Path, make: Callable[[Path], Path], spoil: Callable[[Path, Chance], None]) -> None:
        self._spoil = spoil
        self.path = make(directory / "model")
        root = self.path if self.path.is_dir() else self.path.parent
        self._root, self._files = root, {path: path.read_bytes() for path in root.iterdir()}

    def __call__(self, chance: Chance) -> Path:
        """Make one, and return what to read."""
        for path in self._root.iterdir():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for path, data in self._files.items():
            path.write_bytes(data)
        self._spoil(self.path, chance)
        return self.path


def make_native(path: Path) -> Path:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    pair = {"t": (1, 2.5, b"x"), 3: float("nan"), "a": torch.ones(2, dtype=torch.complex128)}
    return everygpu.save(path, model=model, optimizer=optimizer, w=pair, again=pair["a"])


def spoil_manifest(path: Path, chance: Chance) -> None:
    file = path / "manifest.json"
    if chance.random() < 0.15:
        return spoil_place(file, chance)
    document = json.loads(file.read_text()) | {"sha256": "0" * 64}
    text = spoil_json(document, chance)
    if chance.random() < 0.2:
        return void(file.write_bytes(spoil_bytes(text.encode(errors="surrogatepass"), chance)))
    return void(file.write_bytes(seal(text).encode(errors="surrogatepass")))


def void(_: object) -> None:
    """Drop what a writer returns."""


def spoil_state(path: Path, chance: Chance) -> None:
    file = path / "state.json"
    if chance.random() < 0.1:
        return spoil_place(file, chance)
    text = spoil_json(json.loads(file.read_text()), chance).encode(errors="surrogatepass")
    file.write_bytes(spoil_bytes(text, chance) if chance.random() < 0.2 else text)
    return agree(path)


def spoil_safetensors(path: Path, chance: Chance) -> None:
    """The file of tensors of a checkpoint of ours; its header above all."""
    file = path / chance.choice(["model.safetensors", "optimizer.safetensors", "state.safetensors"])
    if chance.random() < 0.1:
        return spoil_place(file, chance)
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    if chance.random() < 0.3:
        header["__metadata__"]["everygpu"] = spoil_json(json.loads(header["__metadata__"]["everygpu"]), chance)
    text = spoil_json(header, chance).encode(errors="surrogatepass")
    length = chance.choice([len(text), len(text), len(text), len(text), 0, 2**63, 2**40, len(text) + 8])
    data = struct.pack("<Q", length) + text + rest
    file.write_bytes(spoil_bytes(data, chance) if chance.random() < 0.2 else data)
    return agree(path)


def make_index(path: Path) -> Path:
    path.mkdir()
    state = _state()
    save_file({"weight": state["weight"]}, path / "b0")
    torch.save({"bias": state["bias"]}, path / "b1")
    document = {"metadata": {"total_size": 32}, "weight_map": {"weight": "b0", "bias": "b1"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(document))
    return path


def spoil_index(path: Path, chance: Chance) -> None:
    file = path / chance.choice(["model.safetensors.index.json"] * 4 + ["b0", "b1"])
    if chance.random() < 0.15:
        return spoil_place(file, chance)
    if file.suffix != ".json":
        return void(file.write_bytes(spoil_bytes(file.read_bytes(), chance)))
    text = spoil_json(json.loads(file.read_text()), chance).encode(errors="surrogatepass")
    return void(file.write_bytes(spoil_bytes(text, chance) if chance.random() < 0.2 else text))


def make_torch(path: Path) -> Path:
    path.mkdir()
    torch.save({"model": _state(), "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}, path / "a.pt")
    return path / "a.pt"


def spoil_torch(path: Path, chance: Chance) -> None:
    if chance.random() < 0.05:
        return spoil_place(path, chance)
    if chance.random() < 0.2:  # the format before torch 1.6
        torch.save({"model": _state()}, path, _use_new_zipfile_serialization=False)
    if chance.random() < 0.3:
        return void(path.write_bytes(spoil_bytes(path.read_bytes(), chance)))
    data = path.read_bytes()
    if not data.startswith(b"PK"):
        return void(path.write_bytes(chance.choice(PICKLES) + data))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = chance.choice([*members, "a/data.pkl", "a/data.pkl"])
    members[name] = chance.choice(PICKLES) if chance.random() < 0.5 else spoil_bytes(members[name], chance)
    method = chance.choice([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    if chance.random() < 0.1:
        members[name] = bytes(300 * 2**20 if method == zipfile.ZIP_DEFLATED else 2**20)
    return void(path.write_bytes(_pack(members, method, chance)))


def _pack(members: dict[str, bytes], method: int, chance: Chance) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method, compresslevel=1) as archive:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, data in members.items():
            archive.writestr(name, data)
        if chance.random() < 0.1:
            archive.writestr(chance.choice([*members, "b/data.pkl", "A/DATA.PKL"]), b"x")
        for entry in archive.infolist():
            if chance.random() < 0.05:
                field = chance.choice(["header_offset", "file_size", "compress_size", "flag_bits", "compress_type"])
                setattr(entry, field, chance.choice([0, 1, 8, 2**31, 2**33]) % (2**16 if "_s" not in field else 2**40))
    return buffer.getvalue()


def make_dcp(path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save({"model": _state(), "epoch": 3, "list": [torch.ones(1), 2]}, checkpoint_id=path, no_dist=True)
    return path


def spoil_dcp(path: Path, chance: Chance) -> None:
    file = path / chance.choice([".metadata"] * 8 + ["__0_0.distcp"])
    if chance.random() < 0.1:
        return spoil_place(file, chance)
    if chance.random() < 0.2 or file.name != ".metadata":
        return void(file.write_bytes(spoil_bytes(file.read_bytes(), chance)))
    if chance.random() < 0.2:
        return void(file.write_bytes(chance.choice(PICKLES)))
    metadata = pickle.loads(file.read_bytes())
    for _ in range(chance.choice([1, 1, 3])):
        _spoil_record(metadata, chance)
    return void(file.write_bytes(pickle.dumps(metadata, chance.choice([2, 4]))))


def _odd_object(chance: Chance) -> Any:
    doubled: Any = ()
    for _ in range(60):
        doubled = (doubled, doubled)
    itself: list[Any] = []
    itself.append(itself)
    many = torch.Size([2**40, 2**40])
    return chance.choice([odd_value(chance), doubled, [doubled], itself, many, 10**5000, ("x",) * 5000, b"x", {(): ()}])


def _spoil_record(record: Any, chance: Chance) -> None:
    """Replace something in a record of DCP, its dicts and lists, or a record inside."""
    fields = record if isinstance(record, dict | list) else getattr(record, "__dict__", {})
    keys = list(fields) if isinstance(fields, dict) else list(range(len(fields)))
    keys = [key for key in keys if key != "memory_format"]  # torch itself would print what stands there
    if not keys:
        return
    key = chance.choice(keys)
    inner = fields[key]
    if chance.random() < 0.7 and (isinstance(inner, dict | list) or hasattr(inner, "__dict__")):
        _spoil_record(inner, chance)
    else:
        fields[key] = _odd_object(chance)


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path, Chance], None]]] = {
    "manifest": (make_native, spoil_manifest),
    "state": (make_native, spoil_state),
    "safetensors": (make_native, spoil_safetensors),
    "index": (make_index, spoil_index),
    "torch": (make_torch, spoil_torch),
    "dcp": (make_dcp, spoil_dcp),
}
