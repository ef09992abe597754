"""CUDA graphs over several devices, one capture at a time in a process, and captured work that overlaps a backward."""

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from everygpu import comm
from everygpu.comm.streams import kept_stream, queueing_on, queueing_on_each
from everygpu.devices.seed import CapturedRandom, seeds_by_replica
from everygpu.parallel.cuda_graphs.executed_code import profiling
from everygpu.progress import running
from everygpu.torch_private.core import clear_cublas_workspaces, end_route_to_pool, release_pool, route_stream_to_pool


class CaptureLock:
    """Lets one thread at a time capture, or do brief work that can't be done meanwhile: replay, or free a graph.

    A thread that finds another one capturing doesn't wait: it runs its step eagerly and tries again at the next one. A
    capture needs autograd's threads, of which each GPU has one for all models, and locks of models that it uses: one of
    these threads, or a thread with such a lock, would wait forever for the capture's end. Brief work needs neither,
    and is waited for.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._captures = False
        self._pending: list[Callable[[], None]] = []

    @contextmanager
    def taken(self, *, captures: bool = True) -> Iterator[bool]:
        """Hold the lock within; False where another thread captures, or this one holds it already."""
        if not self._acquire(captures=captures, waits=True):
            yield False
            return
        try:
            yield True
        finally:
            self._release()
            self._run_deferred_if_idle()

    def defer_until_idle(self, function: Callable[[], None]) -> None:
        """Call a function that waits for all of a GPU's streams, which CUDA forbids while one of them is captured: at
        once, or, while a thread holds the lock, by that thread later.
        """
        self._pending.append(function)
        self._run_deferred_if_idle()

    def run_deferred(self) -> None:
        """Call what is pending; for the thread that holds the lock, while it captures nothing."""
        while self._pending:
            self._pending.pop()()

    def _run_deferred_if_idle(self) -> None:
        # Looked at again after each release: what came in between found the lock taken.
        while self._pending and self._acquire(captures=False, waits=False):
            try:
                self.run_deferred()
            finally:
                self._release()

    def _acquire(self, *, captures: bool, waits: bool) -> bool:
        me = threading.get_ident()
        with self._changed:
            while waits and self._owner not in (None, me) and not self._captures:
                self._changed.wait()
            if self._owner is not None:
                return False
            self._owner, self._captures = me, captures
            return True

    def _release(self) -> None:
        with self._changed:
            self._owner = None
            self._changed.notify_all()


CAPTURE_LOCK = CaptureLock()
"""Of the process, as CUDA's rules on capturing are."""


T = TypeVar("T")

_STREAM = "capture"
"""Names the stream of each GPU that work is captured on."""


def is_capturing() -> bool:
    """Whether the current stream is being captured: CUDA allows no second capture within."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class MultiGpuGraph:
    """One CUDA graph over several GPUs.

    What it holds may copy between them. Dependencies between GPUs are events, not spinning kernels, so one thread
    replays it in one call and can't deadlock as collectives can. Memory that is allocated while capturing stays the
    graph's, at the same addresses.

    Source:
        "CUDA Graphs" in NVIDIA's CUDA C++ Programming Guide, on capturing across streams; ``torch.cuda.graph``, which
        captures one device.
    """

    def __init__(self, devices: Sequence[torch.device], pool: Any = None) -> None:
        self._devices = list(dict.fromkeys(devices))
        self._graph = torch.cuda.CUDAGraph()
        self._pool: Any = torch.cuda.graph_pool_handle() if pool is None else pool
        self._random: list[_RandomState] = []
        self._generators: list[torch.Generator] = []
        """Of replicas that draw random numbers of their own; see ``ReplicaRandom``."""
        self.has_replaced_generators = False
        """A capture that failed has broken torch's random generators: earlier graphs refer to the old ones."""

    def capture(self, function: Callable[[], T]) -> T:
        """Call a function; what it queues on the devices is captured, and not run.

        One thread at a time may do so; see ``CaptureLock``. The function has run before, so that libraries are loaded;
        it may use threads, and streams besides the current ones; but memory is the graph's only where it is made on the
        current ones. What it returns has its values after each ``replay``. Where it raises, memory is returned, and
        random generators are as before; see ``has_replaced_generators``.
        """
        defaults = [torch.cuda.default_generators[d.index] for d in self._devices[1:]]
        others = [g for g in self._generators if g.device != self._devices[0]]
        self._random = [_RandomState(g) for g in (*defaults, *others)]
        comm.connect(self._devices)
        return_memory(self._devices)
        with on_capture_streams(self._devices):
            self._begin()
            try:
                result = function()
                self._join()
            except BaseException:
                self._abandon()
                raise
            self._end()
        give_back = functools.partial(_release, self._graph, self._devices, self._pool)
        release = weakref.finalize(self, CAPTURE_LOCK.defer_until_idle, give_back)
        release.atexit = False
        return result

    def add_generators(self, devices: Sequence[torch.device]) -> None:
        """Have each of several replicas draw random numbers of its own in the capture, by ``random_of``."""
        self._generators = [torch.Generator(d) for d in devices]

    def random_of(self, devices: Sequence[torch.device], positions: Sequence[int]) -> CapturedRandom:
        """Return the random numbers of some replicas, for a forward that is captured."""
        return CapturedRandom([self._generators[p] for p in positions])

    def new_in_same_pool(self) -> "MultiGpuGraph":
        """Make a graph for what comes after this one, in the same memory: they are replayed in turn.

        Tensors that the second reads must be referenced while it is captured.
        """
        return MultiGpuGraph(self._devices, self._pool)

    def may_replay(self) -> contextlib.AbstractContextManager[bool]:
        """Provide fresh random numbers for a replay within; False while another thread is capturing: before torch
        2.13 none can be drawn then, and a capture that draws none is known as such only after its first replay.
        """
        return CAPTURE_LOCK.taken(captures=False) if self._random else contextlib.nullcontext(True)

    def replay(self) -> None:
        """Queue the work: after what is queued on the devices' current streams, and before what will be.

        Called within ``may_replay``, where that is True.
        """
        home, *others = [torch.cuda.current_stream(d) for d in self._devices]
        seeds = seeds_by_replica(range(len(self._generators))) if self._generators else ()
        for generator, seed in zip(self._generators, seeds):
            generator.manual_seed(seed)
        for state in self._random:
            state.fill()
        for stream in others:
            home.wait_stream(stream)
        with running("replay of a capture", self._devices[0]):
            self._graph.replay()
        for stream in others:
            stream.wait_stream(home)
        self._random = [state for state in self._random if state.is_used()]

    def _begin(self) -> None:
        for d in self._devices[1:]:
            with torch.cuda.device(d):  # where the generator's state is put
                self._graph.register_generator_state(torch.cuda.default_generators[d.index])
        for generator in self._generators:
            with torch.cuda.device(generator.device):
                self._graph.register_generator_state(generator)
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        home, *others = [torch.cuda.current_stream(d) for d in self._devices]
        for d, stream in zip(self._devices[1:], others):
            stream.wait_stream(home)
            with torch.cuda.device(d):
                route_stream_to_pool(d, self._pool)

    def _join(self) -> None:
        home, *others = [torch.cuda.current_stream(d) for d in self._devices]
        for stream in others:
            home.wait_stream(stream)

    def _end(self) -> None:
        try:
            self._graph.capture_end()
        except BaseException:
            self._abandon()
            raise
        self._stop_allocating(self._devices[1:])

    def _abandon(self) -> None:
        """Leave everything as it was before the capture, which CUDA may have declared invalid."""
        try:
            self._join()
            self._graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                self._graph.capture_end()  # or the stream would stay in capture mode
            self._replace_generators()
        self._stop_allocating(self._devices)
        with contextlib.suppress(RuntimeError):
            self._graph.reset()
        _release_pools(self._devices[1:], self._pool)
        return_memory(self._devices)

    def _replace_generators(self) -> None:
        """Replace generators that torch takes to be capture still."""
        for d in self._devices:
            generator = torch.cuda.default_generators[d.index]
            generator.graphsafe_set_state(generator.clone_state())
        self.has_replaced_generators = True

    def _stop_allocating(self, devices: Sequence[torch.device]) -> None:
        for d in devices:
            with contextlib.suppress(RuntimeError):
                end_route_to_pool(d, self._pool)


class _RandomState:
    """The place where one GPU's kernels in a graph find their generator's state.

    Replaying a graph, torch fills it on the GPU's own stream, which the graph, replayed on the first GPU's, doesn't
    wait for. So the same values are put there before: a small graph of the GPU's own has torch do so.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, device = generator, generator.device
        self._before = -1
        self._graph = torch.cuda.CUDAGraph()
        with queueing_on(device, kept_stream(device, _STREAM)):
            x = torch.empty(1, device=device)
            torch.cuda.synchronize(device)
            if generator is not torch.cuda.default_generators[device.index]:  # which torch registers itself
                self._graph.register_generator_state(generator)
            self._graph.capture_begin(capture_error_mode="thread_local")
            x.uniform_(generator=generator)
            self._graph.capture_end()
            self._x = x

    def fill(self) -> None:
        """Put the generator's present state there; the generator stays as it is."""
        self._before = self._generator.get_offset()
        self._graph.replay()
        self._generator.set_offset(self._before)

    def is_used(self) -> bool:
        """Whether the graph that was replayed after ``fill`` draws random numbers."""
        return self._generator.get_offset() != self._before


@contextlib.contextmanager
def on_capture_streams(devices: Sequence[torch.device]) -> Iterator[None]:
    """Queue what is launched within on the streams that work is captured on, in turn with what is around it.

    Autograd runs a node on the stream that its forward was on: going backward through what was captured, it would not
    wait for gradients that are still to come on other streams, of devices after the first. And when it begins to
    capture, torch queues there what resets its random generators' memory.
    """
    pairs = [(torch.cuda.current_stream(d), kept_stream(d, _STREAM)) for d in devices if d.type == "cuda"]
    for around, within in pairs:
        within.wait_stream(around)
    with contextlib.ExitStack() as stack:
        for around, within in pairs:
            stack.callback(around.wait_stream, within)
        for _, within in reversed(pairs):
            stack.enter_context(queueing_on(within.device, within))
        yield


def return_memory(devices: Sequence[torch.device]) -> None:
    """Free cached memory: a graph has a pool of its own, and what earlier steps have used would lie idle.

    Called by the thread that holds the capture lock.
    """
    for d in devices:
        torch.cuda.synchronize(d)
    with profiling(None):  # what finalizers and callbacks run is no part of a step
        gc.collect()
    CAPTURE_LOCK.run_deferred()
    # Libraries' workspaces: the graph needs its own.
    clear_cublas_workspaces()
    torch.cuda.empty_cache()


def _release(graph: Any, devices: Sequence[torch.device], pool: Any) -> None:
    # Freeing memory, CUDA doesn't wait for what other GPUs still write to it.
    for d in devices:
        torch.cuda.synchronize(d)
    graph.reset()
    _release_pools(devices[1:], pool)


def _release_pools(devices: Sequence[torch.device], pool: Any) -> None:
    for d in devices:
        with contextlib.suppress(RuntimeError):
            release_pool(d, pool)


Register = Callable[[Tensor, Callable[[Tensor], None]], RemovableHandle]
"""Has a function called with a tensor when its gradient is there."""


class ReadyEvents:
    """The moments of a backward, while it is captured, at which each replica has all gradients of a group.

    A capture knows dependencies, not the order of calls: work on the groups is queued after the backward, and
    depends on these moments only.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._ready: dict[tuple[int, int], torch.cuda.Event] = {}
        """By group and replica, the last to be ready last."""

    def counter(self, group: int, replica: int, tensors: Iterable[Tensor]) -> Callable[[Tensor], None]:
        """Return a hook to call with each of a replica's tensors of a group when its gradient is ready."""
        left = set(map(id, tensors))

        def note(t: Tensor) -> None:
            left.discard(id(t))
            if not left:  # again and again where gradients come bit by bit: the last one counts
                self._ready.pop((group, replica), None)
                self._ready[group, replica] = torch.cuda.current_stream(t.device).record_event()

        return note

    def mark(self, group: int) -> None:
        """Mark a group as ready after the work that is queued on all devices now."""
        for replica, d in enumerate(self._devices):
            self._ready[group, replica] = torch.cuda.current_stream(d).record_event()

    @contextmanager
    def watching(self, groups: Sequence[Sequence[Sequence[Tensor]]], register: Register) -> Iterator[None]:
        """Note the moments of a backward within, for each group and replica the tensors whose gradients count."""
        handles = []
        for g, row in enumerate(groups):
            for j, tensors in enumerate(row):
                note = self.counter(g, j, tensors)
                handles += [register(t, note) for t in tensors]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forget(self, group: int, replica: int) -> None:
        """Make a group wait for all work queued for a replica: its gradients have changed since the event."""
        self._ready.pop((group, replica), None)

    def run_overlapped(self, works: Mapping[int, Callable[[], None]]) -> None:
        """Queue each group's work while the rest of backward runs, and make the current streams wait for it.

        Groups come in the order in which they are ready: one that comes too early holds up those behind it. Each is
        called with the streams current on which to queue it.
        """
        streams = [kept_stream(d, "during backward") for d in self._devices]
        now = [torch.cuda.current_stream(d).record_event() for d in self._devices]
        for group in self._in_order(works):
            for stream in streams:
                for replica, event in enumerate(now):
                    stream.wait_event(self._ready.get((group, replica), event))
            with queueing_on_each(self._devices, streams):
                works[group]()
        for d in self._devices if works else ():  # a stream that has waited for nothing is no part of the capture
            for stream in streams:
                torch.cuda.current_stream(d).wait_stream(stream)

    def _in_order(self, groups: Iterable[int]) -> list[int]:
        places = {key: place for place, key in enumerate(self._ready)}
        replicas = range(len(self._devices))
        return sorted(groups, key=lambda g: max(places.get((g, j), len(places)) for j in replicas))
