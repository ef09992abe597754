"""CUDA graphs, acted out on the CPU: what a capture gets wrong there, it gets wrong here.

A captured step knows addresses, not objects: it goes on reading and writing the memory that it was made with, whatever
Python has replaced since, and torch's version counters don't see it. Memory that was freed while capturing is used for
other things. ``Tape`` does the same with the operations that reach torch's dispatcher.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter, tree_map_only

import everygpu.comm
from everygpu.devices.seed import seeds_by_replica
from everygpu.parallel.compiler.capturable_graph import innermost
from everygpu.parallel.cuda_graphs import executed_code
from everygpu.parallel.cuda_graphs.host_rng import draw_idly
from everygpu.parallel.engines.thread_state import ThreadState
from everygpu.parallel.replicas.replica_set import ReplicaSet
from everygpu.parallel.sharded.batch import ShardedBatch
from everygpu.step import early_update, sharded_update, shards
from tests.step import torch_kernels

T = TypeVar("T")

REFUSED = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim"}
"""Operations whose result the host needs: CUDA refuses to wait while it captures."""


class Tape:
    """Has ``MultiGpuGraph``'s interface, for CPU replicas.

    Capture runs the operations, as their results' shapes have to be known, and takes back what they did to memory
    that was there before, and to the random generator. Replaying runs them again, on the same memory.
    """

    def __init__(self, devices: Sequence[torch.device], streams: str = "", *, previous: "Tape | None" = None) -> None:
        self.has_replaced_generators = False
        self._previous = previous
        self._moments: list[Callable[[], object]] = []
        self._memories: dict[int, _Memory] = {}
        self._numbers: list[Tensor] = []
        # On GPUs, torch.rand([]) and what is made of it is on the host, where nothing is captured.
        self._on_host: list[Tensor] = []
        self._num_drawn = 0
        self._generators: list[torch.Generator] = []
        # Let go since the capture: other captures use it between replays.
        self._free: list[_Memory] = []

    def capture(self, function: Callable[[], T]) -> T:
        random = torch.get_rng_state()
        earlier = [] if self._previous is None else list(self._previous._memories.values())
        # Operations check the integers that the capture before has made, such as classes and indices.
        for memory in earlier:
            memory.bring_back()
        try:
            with _Recorder(self):
                result = function()
        finally:
            torch.set_rng_state(random)
            with _disable_current_modes():
                draw_idly(self._num_drawn)
            for memory in (*self._memories.values(), *earlier):
                memory.put_back()
        self._clear_the_dead()
        return result

    def new_in_same_pool(self) -> "Tape":
        return Tape([], previous=self)

    def may_replay(self) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(True)

    def add_generators(self, devices: Sequence[torch.device]) -> None:
        self._generators = [torch.Generator(d) for d in devices]

    def random_of(self, devices: Sequence[torch.device], positions: Sequence[int]) -> "TurnsOnTape":
        return TurnsOnTape(self._moments, [self._generators[p] for p in positions])

    def replay(self) -> None:
        for generator, seed in zip(
            self._generators, seeds_by_replica(range(len(self._generators))) if self._generators else ()
        ):
            generator.manual_seed(seed)
        gone = [m for m in self._memories.values() if m.num_bytes and m.is_gone()]
        assert not gone, f"{len(gone)} tensors that the capture uses are freed, of {[m.num_bytes for m in gone]} bytes"
        for memory in self._memories.values():
            if memory.is_let_go():
                self._free.append(memory)
        with torch.no_grad():
            for memory in self._free:
                memory.spoil()
            for moment in list(self._moments):
                moment()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one of torch's operations, and capture it."""
        name = func.overloadpacket.__name__
        if (name == "rand" and not args[0]) or any(x is t for x in args for t in self._on_host):
            result = func(*args, **kwargs)
            self._on_host += [result] if isinstance(result, Tensor) else []
            self._num_drawn += name == "rand"
            return result
        if name in REFUSED or (name.startswith("index") and _has_mask(args[1])):
            self.has_replaced_generators = True  # as after every capture that CUDA has declared invalid
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if name == "lift_fresh" and args[0].dim() == 0:  # 3 in ``x[0] = 3``, which CUDA graphs bake in
            self._numbers.append(args[0])
        held = tree_map_only(Tensor, self.hold, (args, kwargs))
        result = func(*args, **kwargs)
        inputs = {_key(t) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        outputs = [t for t in tree_iter(result) if isinstance(t, Tensor)]
        # Views and what was written in place are where the inputs are.
        made = [(i, t) for i, t in enumerate(outputs) if _key(t) not in inputs]
        targets = [(i, self.hold(t, is_new=True)) for i, t in made]
        is_write = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        is_empty = name.startswith(("empty", "new_empty", "lift_fresh"))
        if (targets and not is_empty) or is_write or "batch_norm" in name:
            self._add(lambda: _run_again(func, *held, targets))
        self._clear_the_dead()
        return result

    def call(self, function: Callable[..., object], tensors: Sequence[Tensor]) -> None:
        """Capture a kernel, which doesn't run while capturing."""
        with _disable_current_modes():
            held = [self.hold(t) for t in tensors]
        self._add(lambda: function(*held))

    def _add(self, moment: "Callable[[], object]") -> None:
        """Have something run as soon as it may: after what is queued on its stream, and what that waits for."""
        stream = HERE.streams[-1] if HERE.streams else None
        if stream is None or not stream.after:
            self._moments.append(moment)
        else:
            self._moments.insert(max(self._moments.index(m) for m in stream.after) + 1, moment)
            stream.after = [moment]

    def mark(self) -> "Moment":
        moment = Moment()
        self._moments.append(moment)
        return moment

    def hold(self, t: Tensor, *, is_new: bool = False) -> Tensor:
        """Return a tensor at the same address, which doesn't keep the memory alive."""
        memory = self._memories.get(_key(t))
        if memory is None:
            memory = self._memories[_key(t)] = _Memory(t.untyped_storage(), is_new=is_new)
        return memory.view(t)

    def _clear_the_dead(self) -> None:
        """Overwrite memory that the captured function has let go of, as others would that got it next."""
        for memory in self._memories.values():
            if memory.is_let_go():
                memory.spoil()
                self._moments.append(memory.spoil)


class TurnsOnTape:
    """Has replicas' own random numbers drawn in turns, by each replay."""

    def __init__(self, moments: list[Callable[[], object]], generators: Sequence[torch.Generator]) -> None:
        self._moments, self._generators = moments, generators
        self._before = torch.Generator()

    def enter(self, index: int) -> None:
        def moment() -> None:
            self._before.set_state(torch.get_rng_state())
            torch.set_rng_state(self._generators[index].get_state())

        self._moments.append(moment)

    def leave(self, index: int) -> None:
        def moment() -> None:
            self._generators[index].set_state(torch.get_rng_state())
            torch.set_rng_state(self._before.get_state())

        self._moments.append(moment)


class Moment:
    """A place in a capture."""

    def __call__(self) -> None:
        """Nothing happens at it."""


class _Memory:
    """A storage, at its address."""

    def __init__(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        self._address = storage.data_ptr()
        self.num_bytes = storage.nbytes() if self._address else 0  # on the "meta" device there is none
        self._ref = StorageWeakRef(storage)
        # A graph keeps what was made in it; what was there before is the owner's.
        self._kept = storage if is_new else None
        self._is_spoiled = False
        self._before = None if is_new or not self.num_bytes else self._bytes().clone()
        self._captured: Tensor | None = None

    def view(self, t: Tensor) -> Tensor:
        if not self.num_bytes:
            return torch.empty(t.shape, dtype=t.dtype)
        assert not t.is_conj()
        assert not t.is_neg()
        return self._as(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())

    def put_back(self) -> None:
        """End the capture: the values of before are there again; what is new has none yet."""
        if self._before is not None and not self.is_gone():
            self._bytes().copy_(self._before)
        self._before = None
        if self._kept is not None:
            self._captured = self._bytes().clone()
            self.spoil()

    def bring_back(self) -> None:
        """Have what was new in a capture hold the values that it got there, until ``put_back``."""
        if self._captured is not None:
            self._bytes().copy_(self._captured)

    def is_gone(self) -> bool:
        return self._kept is None and self._ref.expired()

    def is_let_go(self) -> bool:
        """Tell, once, that nobody refers to the memory any more."""
        if self._kept is None or self._is_spoiled or torch._C._storage_Use_Count(self._kept._cdata) > 1:
            return False
        self._is_spoiled = True
        return True

    def spoil(self) -> None:
        if self.num_bytes:
            self._bytes().fill_(255)  # nan in every floating-point type

    def _bytes(self) -> Tensor:
        return self._as(torch.uint8)

    def _as(self, dtype: torch.dtype) -> Tensor:
        if not self.num_bytes:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer((ctypes.c_char * self.num_bytes).from_address(self._address), dtype=dtype)


class _Recorder(TorchDispatchMode):
    """Hands operations over; one for each thread that takes part."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Batches that are spread over replicas come down to operations on their parts.
        return NotImplemented if ShardedBatch in types else self.tape.run(func, args, kwargs or {})


class _CapturedThreads(ThreadState):
    """Has replicas' threads capture with the caller's."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__(devices)
        self._tape = current_tape()

    def run(self, context: Any, device: torch.device, function: Callable[[], Any], mode: Any = None) -> Any:
        def captured() -> Any:
            with contextlib.nullcontext() if self._tape is None else _Recorder(self._tape):
                return function()

        return super().run(context, device, captured, mode)


class Stream:
    """Keeps in mind what its kernels have to wait for."""

    def __init__(self) -> None:
        self.after: list[Callable[[], object]] = []

    def record_event(self) -> Moment:
        tape = current_tape()
        assert tape is not None
        return tape.mark()

    def wait_event(self, moment: Moment) -> None:
        self.after.append(moment)

    def wait_stream(self, stream: "Stream") -> None:
        """What is captured afterwards comes later anyway."""


class _Here(threading.local):
    """What is current in a thread."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []


HERE = _Here()


def current_tape() -> Tape | None:
    mode = _get_current_dispatch_mode()
    return mode.tape if isinstance(mode, _Recorder) else None


def install(monkeypatch: pytest.MonkeyPatch, *, fused: bool) -> None:
    """Have ``TrainStep`` and ``DataParallel`` capture work of CPU replicas.

    Args:
        fused: Have updates captured, also while backward goes on.
    """
    monkeypatch.setattr("everygpu.step.train_step.can_capture", lambda model, capture: capture is not False)
    monkeypatch.setattr("everygpu.parallel.engines.captured.reach_each_other", lambda devices: True)
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.capture.MultiGpuGraph", Tape)
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.capture.return_memory", lambda devices: None)
    monkeypatch.setattr("everygpu.parallel.engines.threads.ThreadState", _CapturedThreads)
    acted = (__file__, str(torch_kernels.__file__))
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.executed_code.LEFT_OUT", (*executed_code.LEFT_OUT, *acted))
    # Writes that torch doesn't count are looked for on the CPU; on GPUs that would take too long.
    monkeypatch.setattr(sys.modules[ReplicaSet.__module__], "trusts_versions", lambda devices: True)
    monkeypatch.setattr("everygpu.step.flat_parameters.FlatParameters._differs", lambda flat_params, bucket: False)
    # On GPUs no frame of Python's is below the operation that fails.
    above = partial(filter, lambda frame: frame.filename != __file__)
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.capture.innermost", lambda stack: innermost(above(stack)))
    # oneDNN's LSTM returns what its backward needs only while gradients are recorded.
    monkeypatch.setattr("torch.backends.mkldnn.enabled", False)
    kernels = torch_kernels.Kernels(_install_streams(monkeypatch))
    monkeypatch.setattr(everygpu.comm, "kernels", kernels, raising=False)
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.transfer.has_kernels", lambda devices: True)
    if fused:
        monkeypatch.setattr(shards, "can_fuse", _can_fuse)
        monkeypatch.setattr(sharded_update, "can_update_early", early_update.supports_captured_update)


def _can_fuse(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> bool:
    """As on GPUs, but for SGD in smaller dtypes, which torch 2.13 gets wrong on the CPU."""
    is_right = not isinstance(optimizer, torch.optim.SGD) or all(p.dtype is torch.float32 for p in params)
    return is_right and shards.has_fused(optimizer, params)


def prepare(used: Sequence[torch.device], monkeypatch: pytest.MonkeyPatch, *, fused: bool) -> None:
    """Have work captured on GPUs, or acted out for CPU replicas, with updates by fused kernels or without."""
    if used[0].type == "cpu":
        install(monkeypatch, fused=fused)
    elif not fused:
        monkeypatch.setattr(shards, "can_fuse", lambda *_: False)


def _install_streams(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Act streams out; return what queues kernels."""

    @contextlib.contextmanager
    def queueing_on(device: torch.device, stream: Stream | None = None) -> Iterator[None]:
        HERE.streams.append(stream or (HERE.streams[-1] if HERE.streams else Stream()))
        try:
            yield
        finally:
            HERE.streams.pop()

    def queue(function: Callable[..., object], *tensors: Tensor) -> None:
        tape = current_tape()
        if tape is None:
            function(*tensors)
        else:
            tape.call(function, tensors)

    streams: list[Stream] = []

    def new_stream(device: torch.device, purpose: str) -> Stream:
        streams.append(Stream())
        return streams[-1]

    monkeypatch.setattr("everygpu.parallel.cuda_graphs.multi_gpu_graph.kept_stream", new_stream)
    for module in (
        "comm.streams",
        "parallel.engines.thread_state",
        "parallel.cuda_graphs.transfer",
        "step.shards",
    ):
        monkeypatch.setattr(f"everygpu.{module}.queueing_on", queueing_on)
    current: dict[tuple[int, torch.device], Stream] = {}
    key = threading.get_ident
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: current.setdefault((key(), device), Stream()))
    return queue


def _run_again(func: Any, args: Any, kwargs: Any, targets: Sequence[tuple[int, Tensor]]) -> None:
    outputs = [t for t in tree_iter(func(*args, **kwargs)) if isinstance(t, Tensor)]
    for i, target in targets:
        target.copy_(outputs[i])


def _has_mask(indices: Any) -> bool:
    return any(isinstance(t, Tensor) and t.dtype is torch.bool for t in tree_iter(indices))


def _key(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
