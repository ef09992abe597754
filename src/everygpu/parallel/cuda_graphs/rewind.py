"""What a forward starts from: a module's parameters, buffers and modes, and the random generators, to go back to."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import comm
from everygpu.torch_private.tensors import foreach_copy_


class Rewind:
    """Copies of a module's buffers from before a launch, and the state of the generators then.

    Args:
        module: The first replica, as it is recorded; the others' buffers are copies of its.
        devices: One per replica.
        leaves: Of each bundle, on the first device.
        sent: Trained parameters, each with where launches send it on another device; none on a single one.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        leaves: Sequence[Sequence[Tensor]],
        sent: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._devices = list(dict.fromkeys(devices))
        self.homes = [[t.data for t in row] for row in leaves]
        """Where the leaves were made: other forwards may move the module's parameters elsewhere."""
        self.has_parameters = bool(sent)
        """Whether these go back, too; on a single device there is no copy of them."""
        self._sent = [(mine.data, theirs) for mine, theirs in sent]
        self._modes = [(m, m.training) for m in module.modules()]
        self._trains = [(p, p.requires_grad) for p in module.parameters()]
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for t in module.buffers():
            # .data, as a graph of before or after may need them, whose values will be there again.
            kinds.setdefault(t.dtype, []).append(t.data)
        self._buffers = [(same, [t.clone() for t in same]) for same in kinds.values()]

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Copy the buffers; called as the first part of a recording."""
        for buffers, copies in self._buffers:
            foreach_copy_(copies, buffers)

    def generators(self) -> list[Any]:
        """Return the state of each device's generator."""
        return [_read_generator(d) for d in self._devices]

    @contextmanager
    def rewound(self, generators: Sequence[Any]) -> Iterator[None]:
        """Run within from what the launch started from; afterwards everything is as before.

        Args:
            generators: The states at the launch.
        """
        now = self.generators()
        values = [[t.clone() for t in buffers] for buffers, _ in self._buffers]
        with self._as_recorded(), self._as_sent():
            self._set([copies for _, copies in self._buffers], generators)
            try:
                yield
            finally:
                self._set(values, now)

    @contextmanager
    def _as_recorded(self) -> Iterator[None]:
        """Have modules train, and parameters take gradients, as they did."""
        modes = [(m, m.training) for m, _ in self._modes]
        trains = [(p, p.requires_grad) for p, _ in self._trains]
        _set_modes(self._modes, self._trains)
        try:
            yield
        finally:
            _set_modes(modes, trains)

    @contextmanager
    def _as_sent(self) -> Iterator[None]:
        """Have the first device's parameters be what a launch has sent: an update may have come in between."""
        values = [mine.clone() for mine, _ in self._sent]
        for mine, theirs in self._sent:
            comm.fill(mine, theirs)
        try:
            yield
        finally:
            for (mine, _), value in zip(self._sent, values):
                mine.copy_(value)

    @torch.no_grad()
    def _set(self, values: Sequence[list[Tensor]], generators: Sequence[Any]) -> None:
        for (buffers, _), sources in zip(self._buffers, values):
            foreach_copy_(buffers, sources)
        for device, state in zip(self._devices, generators):
            _write_generator(device, state)


def _set_modes(modes: Sequence[tuple[nn.Module, bool]], trains: Sequence[tuple[nn.Parameter, bool]]) -> None:
    for m, is_training in modes:
        m.training = is_training
    for p, is_trained in trains:
        if p.requires_grad != is_trained:
            p.requires_grad_(is_trained)


def _read_generator(device: torch.device) -> Any:
    if device.type != "cuda":
        return torch.get_rng_state()
    generator = torch.cuda.default_generators[device.index]
    return generator.initial_seed(), generator.get_offset()


def _write_generator(device: torch.device, state: Any) -> None:
    if device.type != "cuda":
        torch.set_rng_state(state)
        return
    generator, (seed, offset) = torch.cuda.default_generators[device.index], state
    generator.manual_seed(seed)
    generator.set_offset(offset)
