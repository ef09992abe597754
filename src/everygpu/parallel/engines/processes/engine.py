"""The engine: the first replica in this process, each other one in a helper."""

import logging
import sys
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from everygpu.comm import ipc
from everygpu.parallel.cuda_graphs.guards import has_global_hooks, is_observed
from everygpu.parallel.engines.engine import Call, Engine, EngineContext, Outputs
from everygpu.parallel.engines.processes.direct import DirectCalls, DirectParameters, is_direct
from everygpu.parallel.engines.processes.helper_process import CannotStartError, HelperProcess
from everygpu.parallel.engines.processes.module_sender import ModuleSender
from everygpu.parallel.engines.processes.packing import CannotTravelError
from everygpu.parallel.engines.processes.remote_call import RemoteCall
from everygpu.parallel.engines.thread_state import FactoryUse
from everygpu.parallel.engines.threads import Outcome, Workers, attempt, run_here, take_values
from everygpu.progress import running
from everygpu.torch_private.autograd import is_transforming
from everygpu.torch_private.modes import DeviceContext, function_modes

logger = logging.getLogger("everygpu")


class NotDirectError(Exception):
    """A call needs its parameters to be connected one by one."""


class ProcessReplicas(Engine):
    """Runs each replica after a call's first in a helper process of its own, which works on this process's memory.

    The helpers start at the first call, or by ``start``, and end with this object, or with this process.

    Args:
        context: What it is made from.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._devices = list(context.devices)
        # Parameters are connected bucket by bucket until a call comes that needs more.
        self._may_be_direct = True
        self._parameters: DirectParameters | None = None
        self._direct: DirectCalls | None = None
        self._open: list[weakref.ref[RemoteCall]] = []
        self._threads = Workers(len(self._devices) - 1)
        self._factories = FactoryUse()
        self._helpers: dict[int, HelperProcess] = {}
        self._senders: dict[int, ModuleSender] = {}
        self.reason = unsupported_reason(self._devices)
        """Why replicas run in threads after all, if they do."""
        self.has_told = False
        """Whether the reason has been logged."""
        self._why_here: str | None = None  # of the last call
        self._has_told_why_here = False

    @property
    def in_use(self) -> str:
        return "processes" if self.reason is None and self._why_here is None else "threads"

    def start(self) -> None:
        """Start the helpers, without waiting for them, and new ones for those that are lost.

        Raises:
            CannotStartError: the system starts no further process.
        """
        for position, device in enumerate(self._devices):
            if position and position in self._helpers and self._helpers[position].is_lost:
                self._senders.pop(position, None)
                self._helpers.pop(position).close()
            if position and position not in self._helpers:
                self._helpers[position] = HelperProcess(device, position)

    def is_ready(self) -> bool:
        """Tell, without waiting, whether all helpers have started."""
        return len(self._helpers) == len(self._devices) - 1 and all(h.is_ready() for h in self._helpers.values())

    def launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs | None:
        """Run a call whose parameters are connected bucket by bucket; None where they have to be one by one.

        So they are once a forward comes before the backward of the one before: the copies may be needed as they were.
        """
        self._open = [ref for ref in self._open if (call := ref()) is not None and call.awaits_backward]
        module = self._context.module()
        if self._open or not self._can_be_direct(module):
            self._may_be_direct, self._parameters = False, None
            return None
        if self.reason is not None or _why_here(self._devices[0]) is not None:
            return None
        if self._parameters is None:
            make, cap = self._context.make_replicas, self._context.bucket_cap_mb
            self._parameters = DirectParameters(module, self._devices, make, cap)
        self._direct = self._parameters.begin()
        try:
            return self._context.run(self._parameters.replicas, args, kwargs, around=nullcontext)
        except NotDirectError:
            return None
        finally:
            self._direct = None

    def _can_be_direct(self, module: nn.Module) -> bool:
        if self._parameters is not None and not self._parameters.fits(module):
            self._parameters = None  # a hook may have come, for instance
        if self._parameters is None and self._may_be_direct:
            self._may_be_direct = is_direct(module)
        return self._may_be_direct

    def run(
        self, calls: Sequence[Call], devices: Sequence[torch.device], positions: Sequence[int] | None = None
    ) -> list[Any]:
        """Make the calls side by side and wait for all of them; see ``Engine``."""
        names = list(range(len(calls))) if positions is None else list(positions)
        if self._direct is not None and names[0]:
            raise NotDirectError
        self._why_here = _why_here(self._devices[0])
        if self.reason is None and self._why_here is None:
            outcomes = self._attempt(calls, devices, names)
            if outcomes is not None:
                return take_values(outcomes, list(zip(names, devices, calls)))
        self.refuse_direct()
        if self.reason is None and self._why_here is not None and not self._has_told_why_here:
            self._has_told_why_here = True
            logger.warning("DataParallel: replicas run in threads, not in processes, as long as %s.", self._why_here)
        if self.reason is not None and not self.has_told:
            self.has_told = True
            logger.warning("DataParallel: replicas run in threads, not in processes: %s.", self.reason)
        return self._threads.run(calls, devices, positions)

    def refuse_direct(self) -> None:
        """Refuse a call that ``launch`` has prepared: in threads its parameters have to be connected one by one.

        Raises:
            NotDirectError: it is one; ``launch`` then returns None.
        """
        if self._direct is not None:
            raise NotDirectError

    def run_alone(self, call: Call, device: torch.device) -> Any:
        """Call the module as it is."""
        return self._threads.run_alone(call, device)

    def close(self) -> None:
        """End the helpers and the threads."""
        self._threads.close()
        self._end_helpers()

    def _attempt(
        self, calls: Sequence[Call], devices: Sequence[torch.device], names: Sequence[int]
    ) -> list[Outcome] | None:
        """Make the calls; None where they can't be sent, and nothing has happened."""
        try:
            self.start()
            # The first here, whichever it is: the module takes over its buffers and attributes.
            remote = {i: self._prepare(names[i], call) for i, call in enumerate(calls) if i}
            for sent in remote.values():
                sent.send()
            if self._direct is not None:
                self._direct.connect(self._devices[0])
        except (CannotTravelError, CannotStartError) as error:
            self._give_up(str(error))
            return None
        except BaseException:
            self._end_helpers()
            raise
        mode = self._factories.mode_for(calls[0][0])
        local = [
            partial(run_here, partial(_forward, device, name, module, *args, **kwargs), device, mode)
            for (module, args, kwargs), device, name in zip(calls, devices, names)
        ]
        try:
            # A replica's first answer comes before the call here: what is refused then runs in threads, all of it once.
            answers = {i: attempt(call.receive) for i, call in remote.items() if call.is_first}
            if any(self._is_refused(outcome) for outcome in answers.values()):
                return None
            outcomes = [
                answers[i] if i in answers else attempt(remote[i].receive if i in remote else make)
                for i, make in enumerate(local)
            ]
        except BaseException:  # Ctrl-C while waiting: what helpers answer then is of no use any more
            self._end_helpers()
            raise
        for i, outcome in enumerate(outcomes):
            if self._is_refused(outcome):
                if self._direct is not None:
                    return None
                outcomes[i] = attempt(local[i])
        return outcomes

    def _is_refused(self, outcome: Outcome) -> bool:
        """Tell whether a helper can't make this call, and give up for good if so."""
        _, raised = outcome
        if isinstance(raised, CannotTravelError):
            self._give_up(str(raised))
        return isinstance(raised, CannotTravelError)

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._end_helpers()

    def _prepare(self, position: int, call: Call) -> RemoteCall:
        module, args, kwargs = call
        helper = self._helpers[position]
        helper.wait_until_ready()
        sender = self._senders.get(position)
        if sender is None or sender.module is not module:
            direct = [] if self._direct is None else self._direct.parameters.twins(position)
            sender = self._senders[position] = ModuleSender(
                module, helper.exporter, direct, self._context.module().parameters()
            )
        remote = RemoteCall(helper, sender, args, kwargs, self._direct)
        if self._direct is not None:
            self._open.append(weakref.ref(remote))
        return remote

    def _end_helpers(self) -> None:
        helpers, self._helpers, self._senders = list(self._helpers.values()), {}, {}
        for helper in helpers:
            helper.hang_up()
        for helper in helpers:
            helper.close()


def _forward(device: torch.device, position: int, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    with running("forward", device, position):
        return module(*args, **kwargs)


def unsupported_reason(devices: Sequence[torch.device]) -> str | None:
    """Say why replicas can't be in processes on these devices, if so."""
    if getattr(sys, "frozen", False):
        return "a program that is one file with its interpreter starts itself, where a helper should start"
    if len({d.type for d in devices}) > 1:
        return "the devices are of several kinds"
    if devices[0].type not in ("cuda", "cpu"):
        return f"devices of type {devices[0].type} can't be shared between processes"
    return ipc.unsupported_reason(devices[0].type)


def _why_here(device: torch.device) -> str | None:
    """Say what is at work around a call that a helper doesn't know, if something is."""
    if any(isinstance(m, DeviceContext) and m.device.type != device.type for m in function_modes()):
        return "tensors are made on devices of another kind by default. Leave torch.device(...) before the call"
    if is_observed():
        return (
            "every operation is observed. Call torch.utils.checkpoint within the model, not around it, and leave "
            "save_on_cpu, detect_anomaly or a mode of torch's before the call"
        )
    if is_transforming():
        return "torch.func transforms the call. Transform a function within the model"
    return "there are hooks on all modules. Remove them" if has_global_hooks() else None
