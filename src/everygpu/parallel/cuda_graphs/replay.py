"""One replay of a captured forward: what it returns, and how it goes backward."""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from everygpu import comm, tree
from everygpu.comm.streams import Streams
from everygpu.errors import CaptureError
from everygpu.parallel.buckets import Use, versions_of
from everygpu.parallel.call import Call
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph
from everygpu.parallel.cuda_graphs.transfer import GradReducer, ParameterSync
from everygpu.parallel.scatter.denominator import note_denominator
from everygpu.parallel.sharded.functions import mark_captured
from everygpu.torch_private.core import are_batched

Leaves = list[list[list[Tensor]]]
"""For each bundle and device, what gradients are taken of."""

OTHER_OUTPUTS = "backwards begin at other outputs from step to step"
SECOND_BACKWARD = "a forward is gone backward through twice"
OUTPUTS_WATCHED = "gradients of one output of several are watched (retain_grad or a hook)"
DIFFERENTIATED_AGAIN = "gradients are differentiated again (create_graph=True)"


class Opaque:
    """An output that is no container but has tensors in it, such as a transformer's cache: each replay rebuilds it.

    Raises where it can't be pickled, or has a parameter or another kind of tensor in it.
    """

    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor] = []
        state = io.BytesIO()
        _Pickler(state, self.tensors).dump(value)
        self._state = state.getvalue()

    def make(self, tensors: Iterator[Tensor]) -> Any:
        """Make the object, with others in place of ``tensors``, in order."""
        return _Unpickler(self._state, [next(tensors) for _ in self.tensors]).load()


class _Pickler(pickle.Pickler):
    def __init__(self, state: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(state, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, (nn.Module, nn.Parameter)):
            raise TypeError(f"a {type(value).__name__} in an output is the model's own")
        if not isinstance(value, Tensor):
            return None
        if type(value) is not Tensor or value.layout != torch.strided:
            raise TypeError("a tensor in an output must be dense")
        known = next((i for i, t in enumerate(self._tensors) if t is value), None)
        if known is None:
            known = len(self._tensors)
            self._tensors.append(value)
        return known


class _Unpickler(pickle.Unpickler):
    """Reads what this process has just pickled."""

    def __init__(self, state: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(state))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardGraphs:
    """A forward, and the backward from the outputs that were used."""

    outputs: list[Any]
    """Of each replica."""
    call: Call
    slots: list[Tensor]
    """The tensors in the outputs, in order, then those in ``Opaque``s; they have the values of the last replay."""
    denominators: dict[int, Tensor]
    """What those are divided by that are means of known targets."""
    num_plain: int
    """How many are in no ``Opaque``."""
    differentiable: list[bool]
    """Which of them have gradients."""
    used: tuple[int, ...]
    """Which of them the captured backward takes gradients of."""
    seeds: list[Tensor]
    """Where it finds them."""
    backward: MultiGpuGraph
    gradients: "Gradients"
    """Of the parameters, where the captured backward leaves them."""
    watched: list[Tensor]
    """What backward reads, and Python may write between replays."""


class Gradients(Protocol):
    """Where the gradients of a captured backward go."""

    params: list[Tensor]

    def begin(self) -> None:
        """Make memory for the next replay."""

    def take(self) -> list[Tensor | None]:
        """Return what the last replay gives to autograd for the parameters; None where there is nothing."""
        ...


class ReducedGradients:
    """The sums over all devices, for autograd to add to the parameters' own."""

    def __init__(self, sync: ParameterSync, reducers: Sequence[GradReducer], reached: Sequence[bool]) -> None:
        self.params = sync.params
        self._sync = sync  # the parameters may have another since
        self._reducers = reducers  # the captured backward uses their memory
        self._reached = reached

    def begin(self) -> None:
        self._sync.allocate_sums()

    def take(self) -> list[Tensor | None]:
        return self._sync.totals(self._reached)


class Replay:
    """A forward that was replayed. It goes backward once, from the outputs that were used in the steps before."""

    def __init__(self, captured: ForwardGraphs, refuse: Callable[[str], None]) -> None:
        self.captured = captured
        self.use = Use()
        self._record_no_more = refuse
        self._versions = versions_of(captured.watched)
        """How often what is watched had been written at the replay."""

    def run(self, devices: Sequence[torch.device]) -> list[Any]:
        """Return each replica's outputs in memory of their own, connected to the parameters."""
        anchor, *tensors = _ReplayNode.apply(self, devices, *self.captured.gradients.params)  # type: ignore[no-untyped-call]
        if sum(self.captured.differentiable) > len(devices):  # more than one output of each replica
            mark_captured(anchor.grad_fn)
        for i, total in self.captured.denominators.items():
            note_denominator(tensors[i], total.clone())
        num_plain = self.captured.num_plain
        plain, inside = iter(tensors[:num_plain]), iter(tensors[num_plain:])

        def renew(x: Any) -> Any:
            return next(plain) if isinstance(x, Tensor) else x.make(inside) if isinstance(x, Opaque) else x

        outputs: list[Any] = tree.map_leaves(renew, self.captured.outputs)
        return outputs

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the parameters' gradients, given those of the tensors that were returned.

        Raises:
            CaptureError: the backward is another than the captured one; later steps run in threads.
            RuntimeError: what backward reads was written since the replay.
        """
        captured = self.captured
        given = {i: g for i, g in enumerate(grads) if g is not None}
        if torch.is_grad_enabled() or are_batched(grads):
            self._refuse(DIFFERENTIATED_AGAIN)
        if self.use.is_over:
            self._refuse(SECOND_BACKWARD)
        if tuple(given) != captured.used:
            self._refuse(OTHER_OUTPUTS)
        if versions_of(captured.watched) != self._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "parameter, a buffer or an input of the DataParallel module, between its forward and this backward."
            )
        for seed, grad in zip(captured.seeds, given.values()):
            comm.fill(seed, grad)
        captured.gradients.begin()
        with captured.backward.may_replay() as may_replay:
            if not may_replay:
                raise CaptureError(
                    "DataParallel: another thread is capture, while this backward may draw random numbers for "
                    "several GPUs. Train one model until it is captured, then the other, or pass engine='threads'."
                )
            captured.backward.replay()
        found = captured.gradients.take()
        self.use.is_over = True  # not before: another thread's forward may take the memory at once
        return found

    def _refuse(self, reason: str) -> None:
        self._record_no_more(reason)
        raise CaptureError(
            f"DataParallel: the forward was replayed from a capture, which goes backward once, from the outputs of "
            f"the steps before, but {reason}. Pass engine='threads'; this model runs so from now on."
        )


class _ReplayNode(torch.autograd.Function):
    """Connects what a replay returns to the parameters."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, devices: Sequence[torch.device], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.replay = replay
        ctx.streams = Streams(*devices)
        # Autograd runs a node where its first output is; see ``_Broadcast``.
        anchor = torch.empty(0, device=devices[0])
        captured = replay.captured
        found = [t.clone() for t in captured.slots]
        ctx.mark_non_differentiable(*(t for t, is_one in zip(found, captured.differentiable) if not is_one))
        return anchor, *found

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        with ctx.streams.current():
            return None, None, *ctx.replay.backward(grads)
