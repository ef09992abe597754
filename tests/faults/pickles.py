"""Pickles that ask for more than they hold, or for what is not there."""


def _doubled(start: bytes, step: bytes, num_times: int) -> bytes:
    return start + step * num_times


_GLOBAL = {
    name: f"c{module}\n{name}\n".encode()
    for module, name in (
        *(("__builtin__", "bytearray"), ("__builtin__", "set"), ("_codecs", "encode"), ("collections", "OrderedDict")),
        *(("torch", "Tensor"), ("torch", "FloatTensor"), ("torch", "FloatStorage"), ("torch", "Size")),
        *(("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_sparse_tensor")),
        *(("torch._tensor", "_rebuild_from_type_v2"), ("torch.storage", "UntypedStorage"), ("pathlib", "PosixPath")),
    )
}
_INT = b"\x8a\x05\0\0\0\0\x01"  # 2 ** 32
_TUPLE_60 = _doubled(b")", b"q\0h\0\x86", 60)
_STORAGE = b"(X\x07\0\0\0storage" + _GLOBAL["FloatStorage"] + b"X\x01\0\0\0" + b"0X\x03\0\0\0cpuK\x06tQ"


def _tensor(offset: bytes, size: bytes, stride: bytes) -> bytes:
    empty = b"\x89" + _GLOBAL["OrderedDict"] + b")R"
    return _GLOBAL["_rebuild_tensor_v2"] + b"(" + _STORAGE + offset + size + stride + empty + b"tR"


_EXPANDED = _tensor(b"K\0", _INT + _INT + b"\x86", b"K\0K\0\x86")
PICKLES = [
    b"\x80\x02" + body + b"."
    for body in (
        b"Nr\0\0\0\x10",  # a memo of 2 ** 28
        b"Nr\xff\xff\xff\xff",
        b"\x95" + b"\xff" * 7 + b"\x7fN",
        b"\x8e" + b"\xff" * 7 + b"\x7fN",
        b"X\xff\xff\xff\x7fN",
        b"\x8b\xff\xff\xff\x7f",
        _TUPLE_60,
        b"}" + _TUPLE_60 + b"Ns",  # hashed
        b"}X\x01\0\0\0a" + _TUPLE_60 + b"s",
        _TUPLE_60 + b")R",  # called, and printed
        b"]q\0h\0a",  # holds itself
        b"}" + _doubled(b")", b"\x85", 20_000) + b"Ns",
        _doubled(b"]", b"a", 1) + b"N",
        b"(" * 20_000 + b"t" * 20_000,
        b"}X\x01\0\0\0w" + _doubled(b"]", b"q\0]h\0ah\0a", 60) + b"s",
        _GLOBAL["bytearray"] + _INT + b"\x85R",
        _GLOBAL["_rebuild_from_type_v2"] + b"(" + _GLOBAL["bytearray"] + b"N" + _INT + b"\x85}tR",
        _GLOBAL["Tensor"] + _INT + b"\x85R",
        _GLOBAL["FloatTensor"] + _INT + b"\x85\x81",
        _GLOBAL["UntypedStorage"] + _INT + b"\x85R",
        _GLOBAL["encode"] + b"X\xa0\x86\x01\0" + b"".join(chr(256 + i % 20000).encode() for i in range(50_000))
        + b"X\x08\0\0\0punycode\x86R",
        _GLOBAL["set"] + _TUPLE_60 + b"\x85R",
        _GLOBAL["Size"] + _TUPLE_60 + b"\x85R",
        _GLOBAL["PosixPath"] + _TUPLE_60 + b"\x85R",
        b"}X\x01\0\0\0w" + _EXPANDED + b"s",
        b"}X\x01\0\0\0w" + _tensor(b"K\0", b"K\x06\x85", b"K\x01\x85") + b"s",
        b"}X\x01\0\0\0w" + _tensor(b"J\xff\xff\xff\xff", b"K\x06\x85", b"K\x01\x85") + b"s",
        b"}X\x01\0\0\0w" + _tensor(b"K\0", b"J\xff\xff\xff\xff\x85", b"J\xff\xff\xff\xff\x85") + b"s",
        b"}X\x01\0\0\0w" + _tensor(b"K\0", _TUPLE_60, b"K\x01\x85") + b"s",
        b"0" * 3,
        b"e",
        b"\x94" * 3,
        b"h\x05",
    )
]  # fmt: skip
