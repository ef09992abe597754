"""What the main process and a helper say to each other."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from everygpu.parallel.buckets.plan import BucketPlan
from everygpu.parallel.engines.processes.settings import Settings
from everygpu.parallel.engines.processes.shared_tensors import SharedTensor
from everygpu.parallel.engines.thread_state import Modes

Members = tuple[list[int], BucketPlan]
"""Parameters of a bucket, and how their gradients lie in it."""


class Buckets(NamedTuple):
    """Parameters whose gradients travel together."""

    members: list[Members]
    stay: bool
    """A bucket's gradients lie in the same memory in every backward, once what was there has been given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Any Python value, with the tensors in it apart."""

    data: bytes
    tensors: list[SharedTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUpdate:
    """A parameter or buffer that has moved, or is new."""

    index: int
    tensor: SharedTensor
    grad: SharedTensor | None
    """Where its gradients are added up, if the main process keeps that memory."""
    requires_grad: bool
    is_parameter: bool
    kind: Packed | None
    """Its class and attributes, if it has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUpdate:
    """What has changed in a module since the last call."""

    structure: Packed | None
    """Classes, children and the places of tensors, if the tree is new."""
    attributes: Packed | None
    """Plain attributes of modules whose attributes have changed."""
    tensors: list[ParameterUpdate]
    written: list[int]
    """Parameters and buffers whose values have changed in place."""
    buckets: "Buckets | None"
    """Parameters whose gradients travel together, if the tree is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Housekeeping:
    """What goes along with every message to a helper."""

    given_back: list[int]
    """Tickets of tensors that the main process needs no more."""
    dropped: list[int]
    """Calls whose graphs are gone."""
    ready: int
    """The main process's flag after which the memory may be read, and what was given back be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Call the module."""

    call: int
    keeping: Housekeeping
    update: ModuleUpdate
    globals: Packed | None
    """Variables outside the module that have changed, as ``GlobalsSender`` packs them."""
    settings: Settings | None
    """Of torch and Python, if they have changed."""
    modes: Modes
    generators: Any
    """The states of random generators."""
    arguments: Packed
    needs_grad: list[bool]
    """For each tensor of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Run a call's backward."""

    call: int
    keeping: Housekeeping
    grads: list[SharedTensor | None]
    """For each output that takes gradients."""
    keeps_graph: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A helper has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What the module has returned."""

    call: int
    ready: int
    """The helper's flag after which the tensors may be read."""
    outputs: Packed
    needs_grad: list[bool]
    """For each tensor of the outputs."""
    written: list[int]
    """Which tensors of the arguments the call has written to."""
    changed: list[int]
    """Which buffers it has written to."""
    generators: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketDone:
    """Gradients of a bucket, side by side as its plan says."""

    call: int
    ready: int
    bucket: int
    flat: SharedTensor | None
    """None where no gradient is dense. Lent."""
    present: list[bool]
    """Which parameters of the bucket have a dense gradient."""
    sparse: dict[int, "SparseGrad"]
    """The other gradients, by the parameter's place in the bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseGrad:
    """A gradient in coordinate format, coalesced."""

    indices: SharedTensor
    values: SharedTensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardDone:
    """A backward is over; buckets that weren't named have no gradient."""

    call: int
    ready: int
    inputs: list[SharedTensor | None]
    """Gradients of the arguments that need them."""
    touched: list[int]
    """Parameters whose gradients were added to in the main process's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A call has raised."""

    call: int
    error: bytes
    trace: str
    is_refused: bool = False
    """The call can't be made by a helper; nothing has happened."""


def lent_with(message: Any) -> list[SharedTensor]:
    """Return what the helper lends with a message."""
    if isinstance(message, Returned):
        return message.outputs.tensors
    if isinstance(message, BucketDone):
        sparse = [part for grad in message.sparse.values() for part in (grad.indices, grad.values)]
        return sparse if message.flat is None else [message.flat, *sparse]
    return [g for g in message.inputs if g is not None] if isinstance(message, BackwardDone) else []
