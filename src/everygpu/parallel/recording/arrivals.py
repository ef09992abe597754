"""Parameters that reach the replicas while a recorded forward goes on, in the order in which these ask for them."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu.comm.streams import kept_stream
from everygpu.keys import is_compiled
from everygpu.parallel.recording.bundle import Bundle
from everygpu.parallel.recording.lookups import NO_LOOKUPS, Lookups
from everygpu.parallel.recording.movers import ROW_DTYPES
from everygpu.parallel.stand_in import StandIn, StandInError, check_dropped
from everygpu.parallel.thread_state import queueing_on_each

_arrivals: ContextVar["Arrivals | None"] = ContextVar("everygpu_arrivals", default=None)


class Arrivals:
    """The parameters of one recording on their way to the replicas.

    Replicas may run before everything has arrived. What stands for a parameter in them waits for it as soon as
    anybody asks; compiled code, which is given the parameters themselves, is ``awaiting``.

    Whoever looks rows up is sent these: a language model's embedding, which is asked for first, is larger than any
    other parameter.

    Args:
        bundles: In the order in which backward finishes them.
        devices: One per replica.
    """

    def __init__(self, bundles: Sequence[Bundle], devices: Sequence[torch.device]) -> None:
        self._bundles = list(bundles)[::-1]
        self._devices = list(devices)
        self._places = {
            id(t): place for place, bundle in enumerate(self._bundles) for twins in bundle.twins for t in twins
        }
        self._sent: dict[int, list[torch.cuda.Event]] = {}
        self._sending = threading.Lock()
        self._awaited: set[tuple[torch.cuda.Stream, int]] = set()
        self._made: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []

    def _begin(self) -> None:
        """Have what will be sent come after what is queued on the current streams."""
        self._versions = self._count_writes()
        now = [torch.cuda.current_stream(d).record_event() for d in self._devices]
        for stream in self._streams():
            for event in now:
                stream.wait_event(event)

    def _send(self, place: int) -> list[torch.cuda.Event]:
        """Queue a bundle behind those that were asked for before, if it isn't; return the moments at which it is there.

        Where replicas have got to doesn't matter: a recording knows dependencies, not the order of calls.
        """
        with self._sending:
            if place not in self._sent:
                with queueing_on_each(self._devices, self._streams()):
                    self._bundles[place].send()
                self._sent[place] = [stream.record_event() for stream in self._streams()]
            return self._sent[place]

    def _streams(self) -> list[torch.cuda.Stream]:
        return [kept_stream(d, "beside forward") for d in self._devices]

    @contextmanager
    def awaited(self, replicas: Sequence[nn.Module], *, are_compiled: bool) -> Iterator[None]:
        """Send what replicas that run within use, have them wait for it, and in the end send and await the rest.

        Args:
            replicas: To be run.
            are_compiled: They are; see ``awaiting``.
        """
        token = _arrivals.set(self)
        with ExitStack() as stack:
            stack.callback(self._finish)
            stack.callback(_arrivals.reset, token)
            self._begin()
            for replica in () if are_compiled else replicas:
                # Nor are they elsewhere: a module with a tensor among its attributes isn't recorded.
                stack.enter_context(in_place_of(replica, self._stand_ins(replica)))
            yield
            for place in range(len(self._bundles)):
                self._send(place)

    def check(self) -> None:
        """Refuse a recording that would go wrong; when nothing runs within.

        Raises:
            StandInError: somebody has kept what stands for a parameter, and would wait for the recording's events; or
                the first replica writes to a parameter, which may be on its way to the others.
        """
        if self._count_writes() != self._versions:
            raise StandInError(Arriving, "a parameter is written in the forward")
        check_dropped(self._made, Arriving)

    def wait(self, tensors: Sequence[object], lookups: Lookups = NO_LOOKUPS) -> None:
        """Have the current streams wait for parameters, each on its device; for nothing that isn't one.

        Args:
            tensors: Parameters and others.
            lookups: Of which of them no more than rows are needed.
        """
        for i, t in enumerate(tensors):
            place = self._places.get(id(t))
            if place is None or not isinstance(t, Tensor):
                continue
            if i in lookups:
                for k in lookups[i]:
                    self.wait_for_rows(t, tensors[k])
            else:
                self._wait(place, t.device)

    def wait_for_rows(self, t: Tensor, rows: object) -> None:
        """Have a device's current stream wait for rows of a parameter; for all where that is as quick, or must be.

        Args:
            t: The parameter there.
            rows: Which, on the same device.
        """
        place = self._places[id(t)]
        is_there = (torch.cuda.current_stream(t.device), place) in self._awaited
        if self._bundles[place].is_table and not is_there and _are_rows(rows, t):
            self._bundles[place].send_rows(t, rows.contiguous())
        else:
            self._wait(place, t.device)

    def wait_on(self, device: torch.device) -> None:
        """Have a device's current stream wait for all that it gets."""
        for place in range(len(self._bundles)) if device != self._devices[0] else ():
            self._wait(place, device)

    def _wait(self, place: int, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        if (stream, place) not in self._awaited:
            for event in self._send(place):
                stream.wait_event(event)
            self._awaited.add((stream, place))  # not before: another thread may use the stream

    def _count_writes(self) -> list[int]:
        return [t._version for bundle in self._bundles for t in bundle.originals]

    def _finish(self) -> None:
        for d in self._devices:
            for stream in self._streams():
                torch.cuda.current_stream(d).wait_stream(stream)

    def _stand_ins(self, replica: nn.Module) -> dict[int, Tensor]:
        # Compiled code can't be given any.
        given = [p for m in replica.modules() if is_compiled(m) for p in m.parameters()]
        self.wait(given)
        left = self._places.keys() - set(map(id, given))
        made: dict[int, Tensor] = {id(p): Arriving(p, self) for p in replica.parameters() if id(p) in left}
        self._made += map(weakref.ref, made.values())
        return made


class Arriving(StandIn):
    """Stands for a parameter until it has arrived."""

    # What is written to it isn't counted, on the first device either, from which the parameter is still being sent.
    refused = frozenset({Tensor.data.__get__, Tensor.data.__set__})  # type: ignore[attr-defined]

    _twin: Tensor
    _on_its_way: Arrivals

    @staticmethod
    def __new__(cls, twin: Tensor, arrivals: Arrivals) -> "Arriving":
        made: Arriving = StandIn.__new__(cls, twin.shape, twin)
        vars(made).update(vars(twin))
        made._is_param = isinstance(twin, nn.Parameter)  # by which torch knows parameters
        made._twin, made._on_its_way = twin, arrivals
        return made

    @classmethod
    def settle_part(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.embedding and kwargs.get("max_norm") is None:
            rows, weight = args
            if isinstance(weight, Arriving):
                weight._on_its_way.wait_for_rows(weight._twin, rows)
                return rows, weight._twin
        return args

    def settle(self) -> Tensor:
        """Return the parameter, for use on the current stream."""
        self._on_its_way.wait([self._twin])
        return self._twin


def _are_rows(rows: object, table: Tensor) -> TypeGuard[Tensor]:
    """Tell whether these are rows of a table that a kernel can be told, and not as many as there are."""
    if type(rows) is not Tensor or rows.dtype not in ROW_DTYPES or rows.device != table.device:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(rows):  # has no address
        return False
    return 0 < rows.numel() < table.shape[0]


def awaiting(function: Callable[..., Any], lookups: Lookups = NO_LOOKUPS) -> Callable[..., Any]:
    """Have a function wait for those of its arguments that are parameters on their way.

    Args:
        function: Takes tensors.
        lookups: Of which of them it looks rows up only.
    """

    def run(*inputs: Any) -> Any:
        arrivals = _arrivals.get()
        if arrivals is not None:
            arrivals.wait(inputs, lookups)
        return function(*inputs)

    return run


def await_on(device: torch.device) -> None:
    """Have a device's current stream wait for everything that is on its way there."""
    arrivals = _arrivals.get()
    if arrivals is not None:
        arrivals.wait_on(device)


@contextmanager
def in_place_of(module: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Have a module and those below it use other tensors for their parameters, by these' ``id``."""
    tables = [
        (m._parameters, name, p) for m in module.modules() for name, p in m._parameters.items() if id(p) in others
    ]
    for table, name, p in tables:
        table[name] = others[id(p)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, name, p in tables:
            if table.get(name) is others[id(p)]:
                table[name] = p
