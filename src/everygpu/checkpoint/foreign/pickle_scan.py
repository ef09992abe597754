"""Read a pickle's instructions without executing any, and refuse those that would never end.

A pickle that runs nothing can still stop its reader: nine bytes ask for a table of four gigabytes, a hundred bytes
build a tuple whose hash takes centuries, one number in a call takes all memory. Each instruction is counted here with
what it takes from the stack, so that what the unpickler will do is known to be small before it begins.

Source: ``pickletools``, which says of each instruction what it takes from the stack and puts there.
"""

import math
import pickletools
from pathlib import Path
from typing import Any, BinaryIO

from everygpu.checkpoint.brief import brief
from everygpu.checkpoint.foreign.bounds import max_unfolded_bytes
from everygpu.checkpoint.foreign.faults import broken
from everygpu.errors import CheckpointDamagedError

_MAX_INSTRUCTIONS = 10_000_000
_MAX_WORK = 100_000_000
"""Values that all instructions together go over, each with what is in it: a tuple is hashed with what it holds."""
_MAX_DEPTH = 400
"""Of values and the calls that make them; Python hashes nested tuples by recursion that nothing bounds."""
_MAX_AXES = 64

_IN_PLACE = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"})
_CALLS = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX"})
_SIZED = frozenset(f"torch._utils _rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "qtensor"))
_CODECS = frozenset({"latin1", "latin-1", "ascii", "utf-8", "utf8"})
"""Some others, such as punycode, take a time that grows with the square of the text."""


class Global(str):
    """A class or function that a pickle names, as ``module name``."""

    __slots__ = ()


class _Node:
    """What stands for a value: how many it unfolds to, how deep it is, and itself where that matters."""

    __slots__ = ("depth", "value", "weight")

    def __init__(self, weight: int = 1, depth: int = 1, value: Any = None) -> None:
        self.weight, self.depth, self.value = weight, depth, value


def scan_pickle(file: BinaryIO, num_bytes: int, path: Path) -> Any:
    """Check one pickle, from where a file stands to the pickle's end.

    Args:
        file: Open for reading.
        num_bytes: How many bytes there are at most.
        path: The file to name in errors.
    Returns:
        Its value where that is a number, a text, a tuple of these or a `Global`; else None.
    Raises:
        CheckpointDamagedError: it is no pickle, is cut off, or would take memory or time beyond what it holds.
    """
    scan = _Scan(path, max_unfolded_bytes(num_bytes))
    try:
        for opcode, arg, _ in pickletools.genops(_Bounded(file, num_bytes)):  # type: ignore[arg-type]
            scan.follow(opcode, arg)
    except CheckpointDamagedError:
        raise
    except (ValueError, LookupError, OverflowError) as cause:
        raise broken(path, f"holds no readable pickle ({brief(str(cause))})") from cause
    return scan.result


class _Bounded:
    """Reads no more than there is, whatever length a pickle gives."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file, self._rest = file, num_bytes

    def read(self, num_bytes: int) -> bytes:
        return self._count(self._file.read(min(num_bytes, self._rest)))

    def readline(self) -> bytes:
        return self._count(self._file.readline(self._rest))

    def _count(self, data: bytes) -> bytes:
        self._rest -= len(data)
        return data


class _Scan:
    """The unpickler's stack and memo, with nodes in place of values."""

    def __init__(self, path: Path, max_elements: int) -> None:
        self.result: Any = None
        self._path, self._max_elements = path, max_elements
        self._stack: list[_Node] = []
        self._outer: list[list[_Node]] = []
        self._memo: dict[int, _Node] = {}
        self._num_instructions = self._work = 0

    def follow(self, opcode: pickletools.OpcodeInfo, arg: Any) -> None:
        name, stack = opcode.name, self._stack
        self._num_instructions += 1
        if self._num_instructions > _MAX_INSTRUCTIONS:
            raise self._broken(f"has more than {_MAX_INSTRUCTIONS} instructions")
        if name in _GETS:
            stack.append(self._memo[int(arg)])
        elif name in _PUTS:
            self._put(len(self._memo) if arg is None else int(arg))
        elif name == "MARK":
            self._outer.append(stack)
            self._stack = []
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "POP" and not stack:  # it takes the mark
            self._stack = self._outer.pop()
        elif name == "STOP":
            self.result = stack[-1].value
        elif opcode.stack_before:
            self._build(opcode, arg)
        elif opcode.stack_after:
            self._work += 1
            stack.append(_Node(value=_value_of(name, arg, [])))

    def _put(self, index: int) -> None:
        # Picklers number what they remember. Python's own keeps a table as long as the highest number.
        if not 0 <= index <= self._num_instructions:
            raise self._broken(f"remembers a value under the number {index}")
        self._memo[index] = self._stack[-1]

    def _build(self, opcode: pickletools.OpcodeInfo, arg: Any) -> None:
        taken = self._take(opcode)
        self._work += 1 + sum(node.weight for node in taken)
        depth = 1 + max((node.depth for node in taken), default=0)
        if self._work > _MAX_WORK:
            raise self._broken(f"unfolds to more than {_MAX_WORK} values")
        if depth > _MAX_DEPTH:
            raise self._broken("holds itself, or is nested beyond reason")
        if opcode.name in _CALLS:
            self._check_call(taken[0].value, taken[1].value)
        elif opcode.name == "BUILD" and isinstance(taken[1].value, tuple) and len(taken[1].value) == 4:
            self._check_size(taken[1].value)  # tensors of before torch 0.4
        if not opcode.stack_after:
            return
        weight = 1 + sum(node.weight for node in taken)
        if opcode.name in _IN_PLACE:
            taken[0].weight, taken[0].depth = weight, max(depth, taken[0].depth)
            self._stack.append(taken[0])
        else:
            self._stack.append(_Node(weight, depth, _value_of(opcode.name, arg, taken)))

    def _take(self, opcode: pickletools.OpcodeInfo) -> list[_Node]:
        """Take an instruction's operands off the stack, the lowest first."""
        before, above = opcode.stack_before, []
        if pickletools.markobject in before:
            above, self._stack = self._stack, self._outer.pop()
            before = before[: before.index(pickletools.markobject)]
        begin = len(self._stack) - len(before)
        if begin < 0:
            raise IndexError(f"{opcode.name} finds too little on the stack")
        below = self._stack[begin:]
        del self._stack[begin:]
        return below + above

    def _check_call(self, function: Any, args: Any) -> None:
        if not isinstance(function, Global):
            raise self._broken("calls what is no function")
        if function == "torch._tensor _rebuild_from_type_v2" and isinstance(args, tuple) and len(args) > 2:
            self._check_call(args[0], args[2])
        first, second = (*args, None, None)[:2] if isinstance(args, tuple) else (None, None)
        if function in ("builtins bytearray", "__builtin__ bytearray") and not isinstance(first, str | bytes):
            raise self._broken("asks for memory without content")
        if function == "_codecs encode" and second not in _CODECS:
            raise self._broken(f"has bytes in the encoding {brief(second)}")
        is_memory = function.startswith("torch") and function.endswith(("Tensor", "Storage"))
        if is_memory and isinstance(first, int):
            raise self._broken("asks for memory without content")
        if function in _SIZED:
            self._check_size(args)

    def _check_size(self, args: Any) -> None:
        """See that a tensor, of which storage, offset, size and strides are given, is one that can be gone through."""
        size = args[2] if isinstance(args, tuple) and len(args) > 3 else ()
        if not isinstance(size, tuple) or not all(type(length) is int for length in size) or len(size) > _MAX_AXES:
            raise self._broken("has a tensor whose size is no short tuple of numbers")
        if math.prod(size) > self._max_elements:
            raise self._broken(f"has a tensor of the size {brief(size)}, far more than the file holds")

    def _broken(self, what: str) -> CheckpointDamagedError:
        return broken(self._path, what)


def _value_of(name: str, arg: Any, taken: list[_Node]) -> Any:
    if name in _TUPLES:
        return tuple(node.value for node in taken)
    if name in ("GLOBAL", "INST"):
        return Global(arg)
    if name == "STACK_GLOBAL":
        return Global(" ".join(str(node.value) for node in taken))
    return arg if isinstance(arg, int | str | bytes) else None
