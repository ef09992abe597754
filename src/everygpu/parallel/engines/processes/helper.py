"""A helper process: one device's replica, with an interpreter of its own."""

import contextlib
import faulthandler
import io
import operator
import os
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everygpu.comm.ipc import Flags
from everygpu.comm.streams import current_stream
from everygpu.parallel.buckets.memory import versions_of
from everygpu.parallel.engines.processes.connection import Connection
from everygpu.parallel.engines.processes.ends import follow, leave_signals_to_parent
from everygpu.parallel.engines.processes.exceptions import pack_exception
from everygpu.parallel.engines.processes.generators import cuda_state, set_generators
from everygpu.parallel.engines.processes.globals_receiver import GlobalsReceiver
from everygpu.parallel.engines.processes.gradients import GradientSender
from everygpu.parallel.engines.processes.messages import (
    Backward,
    BackwardDone,
    Failed,
    Forward,
    Housekeeping,
    Packed,
    Ready,
    Returned,
)
from everygpu.parallel.engines.processes.module_receiver import Binding, ModuleReceiver
from everygpu.parallel.engines.processes.packing import CannotTravelError, describe_all, pack, unpack
from everygpu.parallel.engines.processes.settings import apply_settings
from everygpu.parallel.engines.processes.shared_tensors import Exporter, Importer
from everygpu.parallel.engines.thread_state import FactoryUse, fresh_casts, leave_checkpoints, on_device
from everygpu.progress import STACKS_SIGNAL

MAIN_FLAG, HELPER_FLAG = 0, 64
"""Which of the flags each process's stream writes; each has a cache line of its own."""


class Graph(NamedTuple):
    """A call that may be asked for its backward."""

    outputs: list[Tensor]
    """Those that take gradients."""
    inputs: list[Tensor]
    """Those that take gradients."""
    binding: Binding


class Helper:
    """Serves one main process.

    Args:
        connection: To the main process.
        flags: The main process's.
        device: Where the replica is.
    """

    def __init__(self, connection: Connection, flags: Flags, device: torch.device) -> None:
        self._connection = connection
        self._flags = flags
        self._device = device
        self._stream = current_stream(device)
        self._exporter = Exporter(device)
        self._importer = Importer(device)
        self._num_writes = 0
        self._factories = FactoryUse()
        self._host_seed: int | None = None
        self._graphs: dict[int, Graph] = {}  # by the number of the call
        complete: list[Tensor] = []
        self._module = ModuleReceiver(self._importer, complete.append)
        self._globals = GlobalsReceiver(self._open, self._module.find)
        self._gradients = GradientSender(device, self._exporter, complete, self._say)

    def serve(self) -> None:
        """Answer until the main process hangs up, or ends.

        Raises:
            EOFError: it has.
        """
        self._connection.send(Ready())
        while True:
            message = self._connection.receive()
            answer: Returned | BackwardDone | Failed
            try:
                self._keep_house(message.keeping)
                answer = self._forward(message) if isinstance(message, Forward) else self._backward(message)
            except BaseException as error:  # noqa: BLE001 - raised again in the main process
                leave_checkpoints(error)
                answer = _failure(message.call, error)
            del message  # while this waits, it holds no activations
            self._connection.send(answer)
            del answer

    def _keep_house(self, keeping: Housekeeping) -> None:
        if self._stream is not None:
            self._flags.wait(MAIN_FLAG, keeping.ready, self._stream)
        self._exporter.take_back(keeping.given_back)
        for call in keeping.dropped:
            self._graphs.pop(call, None)

    def _say(self, make: Any) -> None:
        """Send what a function makes of the flag that this process's stream writes now."""
        self._connection.send(make(self._written()))

    def _written(self) -> int:
        """Have the stream write the flag, after what is queued now."""
        self._num_writes += 1
        if self._stream is not None:
            self._flags.write(HELPER_FLAG, self._num_writes, self._stream)
        return self._num_writes

    def _forward(self, message: Forward) -> Returned:
        if message.settings is not None:
            apply_settings(message.settings)
        module = self._module.apply(message.update)
        self._globals.apply(message.globals, self._module.modules, is_renewed=self._module.is_renewed)
        set_generators(self._device, message.generators, before=self._host_seed)
        self._host_seed = message.generators[1]
        tensors = self._open(message.arguments)
        for t, needs_grad in zip(tensors, message.needs_grad):
            t.requires_grad_(needs_grad)
        args, kwargs = unpack(message.arguments, tensors, self._module.find)
        ours = self._module.binding.tensors
        before = versions_of(tensors), versions_of(ours.values())
        here = on_device(self._device, self._stream, self._factories.mode_for(module))
        with message.modes.entered(), fresh_casts(), here, self._gradients.refused(self._module.binding):
            output = module(*args, **kwargs)
        try:
            packed, shared = pack(output, self._exporter, {}, lends=True, prepare=self._own)
        except CannotTravelError as error:
            raise CannotTravelError(f"what forward returns has {error}") from error
        if any(t.requires_grad for t in shared):
            inputs = [t for t, needs in zip(tensors, message.needs_grad) if needs]
            outputs = [t for t in shared if t.requires_grad]
            self._graphs[message.call] = Graph(outputs, inputs, self._module.binding)
        return Returned(
            call=message.call,
            ready=self._written(),
            outputs=packed,
            needs_grad=[t.requires_grad for t in shared],
            written=[i for i, is_other in enumerate(map(operator.ne, versions_of(tensors), before[0])) if is_other],
            changed=[i for i, now, then in zip(ours, versions_of(ours.values()), before[1]) if now != then],
            generators=cuda_state(self._device),
        )

    def _open(self, packed: Packed) -> list[Tensor]:
        return [self._importer.open(shared) for shared in packed.tensors]

    def _own(self, t: Tensor) -> Tensor:
        """Copy an output that is an input, a parameter or a buffer: the main process has that memory already."""
        if t.layout != torch.strided or t.device != self._device:
            return t
        root = t if t._base is None else t._base
        return t.clone() if root.is_leaf and self._importer.owns(t) else t.resolve_conj().resolve_neg()

    def _backward(self, message: Backward) -> BackwardDone:
        outputs, inputs, binding = self._graphs[message.call]
        if not message.keeps_graph:
            del self._graphs[message.call]
        pairs = [(t, self._importer.open(g)) for t, g in zip(outputs, message.grads) if g is not None]
        for t in inputs:
            t.grad = None
        with self._gradients.collecting(message.call, binding):
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs], retain_graph=message.keeps_graph)
        found = [t.grad for t in inputs]
        for t in inputs:
            t.grad = None
        return BackwardDone(
            call=message.call,
            ready=self._written(),
            inputs=describe_all(found, self._exporter, lends=True),
            touched=self._gradients.touched,
        )


def _failure(call: int, error: BaseException) -> Failed:
    is_refused = isinstance(error, CannotTravelError)
    trace = "".join(traceback.format_exception(error))
    return Failed(call=call, error=pack_exception(error), trace=trace, is_refused=is_refused)


def main(args: Sequence[str]) -> None:
    """Serve the main process that has started this one.

    Args:
        args: The file descriptors of the socket, of the flags and of the main process's standard error; the main
            process's id; and the replica's device.
    """
    leave_signals_to_parent()
    socket_fd, flags_fd, stderr_fd, parent = map(int, args[:4])
    for fd in (socket_fd, flags_fd):
        os.set_inheritable(fd, False)
    end = socket.socket(fileno=socket_fd)
    if STACKS_SIGNAL is not None:
        faulthandler.register(STACKS_SIGNAL, all_threads=True)  # on what is standard error then
    watch = threading.Thread(target=follow, args=(parent, end), daemon=True)
    watch.start()
    device = torch.device(args[4])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # makes the context
    helper = Helper(Connection(end), Flags(flags_fd), device)
    _write_to(stderr_fd)
    with contextlib.suppress(EOFError):
        helper.serve()
    watch.join()  # it ends this process


def _write_to(stderr_fd: int) -> None:
    """Write to the main process's standard error from now on, and to its standard output line by line."""
    sys.stderr.flush()
    os.write(stderr_fd, os.pread(2, os.fstat(2).st_size, 0))  # what was said at the start
    os.dup2(stderr_fd, 2)
    os.close(stderr_fd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
