"""Where the rows of a batch are, and copies between there and the device of the joined tensor."""

import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from everygpu import comm
from everygpu.comm.streams import NOTHING, Streams


class DeviceWeights(Sequence[float]):
    """Weights of results per replica that are still being computed: only reading one as a number waits for them."""

    def __init__(self, tensor: Tensor, rows: tuple[int, ...] = ()) -> None:
        self.tensor, self.rows = tensor, rows
        self.on_mean: Callable[[], None] | None = None
        self.on_mixed: Callable[[Tensor], None] | None = None
        self._numbers: tuple[float, ...] | None = None

    def shares(self) -> Tensor:
        """Return each one's share of the whole, on the device; all equal if all weights are 0."""
        if self.on_mean is not None:
            self.on_mean()
        total = self.tensor.sum()
        return torch.where(total > 0, self.tensor / total, 1 / len(self.tensor))

    def _read(self) -> tuple[float, ...]:
        if self._numbers is None:
            self._numbers = tuple(self.tensor.tolist())
        return self._numbers

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, (tuple, DeviceWeights)) and tuple(self) == tuple(other))

    __hash__ = None  # type: ignore[assignment]


class RowWeights(tuple[int, ...]):
    """The rows of results per replica, by which they count where it isn't known what they are the mean of."""

    on_mean: Callable[[], None] | None = None
    """Called where a mean is taken by them."""
    on_mixed: Callable[[Tensor], None] | None = None
    """Called where a mean is taken of results of several weights, with whether these differ."""

    @property
    def rows(self) -> tuple[int, ...]:
        return self


def mix_weights(a: Sequence[float] | None, b: Sequence[float] | None) -> Sequence[float] | None:
    """Return how much results count that were computed from results by both weights; None where nothing says it.

    Weights of one call's results that differ leave the rows.
    """
    if a is b or b is None:
        return a
    kinds = DeviceWeights, RowWeights
    if a is None or not (isinstance(a, kinds) and isinstance(b, kinds) and a.rows and a.rows == b.rows):
        return b if a is None or a == b else None
    if isinstance(a, RowWeights) and isinstance(b, RowWeights):
        return a
    x, y = (w.tensor if isinstance(w, DeviceWeights) else _full_like(w, other) for w, other in ((a, b), (b, a)))
    differ = (x * y.sum() != y * x.sum()).any()
    mixed = DeviceWeights(torch.stack([torch.where(differ, n, each) for each, n in zip(x.unbind(), a.rows)]), a.rows)
    mixed.on_mixed = a.on_mixed
    mixed.on_mean = None if a.on_mixed is None else partial(a.on_mixed, differ)
    return mixed


def _full_like(numbers: Sequence[float], like: Any) -> Tensor:
    # A tensor of numbers would be copied from the host, which a capture can't.
    return torch.stack([torch.full_like(x, n) for x, n in zip(like.tensor.unbind(), numbers)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Where the rows of a batch are."""

    home: torch.device
    """Device of the batch, where the joined tensor is made."""
    devices: tuple[torch.device, ...]
    sizes: tuple[int, ...]
    """Rows of each part."""
    weights: Sequence[float] | None
    """How much each part counts, by its rows most often, when every replica returned one number for all its rows."""
    home_stream: torch.cuda.Stream | None
    streams: Streams
    """Of the other GPUs on which the parts were computed."""
    lock: AbstractContextManager[Any] = field(default_factory=threading.RLock, compare=False)
    """Held while joined values are made; made once a layout, as most batches are never joined."""

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @property
    def shares(self) -> tuple[float, ...]:
        """Weight of each part in a mean over the rows; they sum to 1."""
        if isinstance(self.weights, RowWeights) and self.weights.on_mean is not None:
            self.weights.on_mean()
        counts = self.weights if self.weights and sum(self.weights) else self.sizes
        return tuple(n / sum(counts) for n in counts)

    def on_streams(self) -> AbstractContextManager[object]:
        """Make the parts' streams current, also in autograd's threads."""
        return self.streams.current()

    @contextmanager
    def on_home_stream(self) -> Iterator[None]:
        """Allocate on the home device's stream of the forward, which later uses are ordered after."""
        stream = self.home_stream
        current = None if stream is None else torch.cuda.current_stream(stream.device)
        if stream is None or current is None or current == stream:
            yield
            return
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)


def layout_of(
    home: torch.device, devices: Sequence[torch.device], sizes: Sequence[int], weights: Sequence[float] | None
) -> ShardLayout:
    """Describe a batch whose parts were computed on the current streams."""
    return ShardLayout(
        home=home,
        devices=tuple(devices),
        sizes=tuple(sizes),
        weights=weights if isinstance(weights, (DeviceWeights, RowWeights, type(None))) else tuple(weights),
        home_stream=torch.cuda.current_stream(home) if home.type == "cuda" else None,
        streams=Streams(*(d for d in devices if d != home)),
    )


def same_rows(a: ShardLayout, b: ShardLayout) -> bool:
    """Whether two layouts have the same rows on the same devices."""
    return a is b or (a.sizes == b.sizes and a.devices == b.devices and a.home == b.home)


def inference_mode(on: bool) -> AbstractContextManager[object]:
    """Switch inference mode on or off, if it is not so already."""
    return NOTHING if on == torch.is_inference_mode_enabled() else torch.inference_mode(on)


def concatenate(
    parts: Sequence[Tensor], layout: ShardLayout, dim: int, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """Copy the parts into one tensor of the given shape and strides, where the joined tensor lives."""
    joined = parts[0].new_empty_strided(shape, strides, device=layout.home)  # fake, if the parts are
    for target, part in zip(split(joined, layout, dim), parts):
        comm.fill(target, part)
    return joined


def split(x: Tensor, layout: ShardLayout, dim: int) -> Sequence[Tensor]:
    """Cut a tensor as a layout says; ``torch.split`` is two functions in Python around this one."""
    return torch.split_with_sizes(x, layout.sizes, dim)


def joined_strides(parts: Sequence[Tensor], shape: Sequence[int], dim: int) -> Sequence[int]:
    """Return strides in the order of the parts' if these are dense, as an operation on the joined tensor would."""
    if dim == 0 and parts[0].numel() and parts[0].shape[0] > 1 and all(p.is_contiguous() for p in parts):
        return parts[0].stride()  # none depends on the number of rows
    model = max(parts, key=lambda p: p.shape[dim])
    order = list(range(len(shape)))[::-1]
    # A single row is contiguous in any order: only its strides show where the rows are.
    if model.shape[dim] == 1 or not all(p.is_contiguous() for p in parts):
        by_stride = sorted(order, key=lambda d: (model.stride(d), -d))
        order = by_stride if _is_dense(model, by_stride) else order
    strides = [0] * len(shape)
    for i, d in enumerate(order):
        strides[d] = math.prod(max(1, shape[e]) for e in order[:i])
    return strides


def _is_dense(x: Tensor, order: Sequence[int]) -> bool:
    steps = itertools.accumulate((x.shape[d] for d in order), operator.mul, initial=1)
    return all(x.shape[d] == 1 or x.stride(d) == step for d, step in zip(order, steps))


def move(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; see ``move_to_each``."""
    return x if x.device == device else move_to_each(x, [device])[0]


def move_to_each(x: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Copy a tensor to several devices; one that is expanded, as gradients of sums are, is copied unexpanded."""
    if all(d == x.device for d in devices):
        return [x] * len(devices)
    repeated = [d for d in range(x.ndim) if x.stride(d) == 0 and x.shape[d] > 1]
    seed = x
    for d in repeated:
        seed = seed.narrow(d, 0, 1)
    copied = comm.copy_to_each(seed, devices)
    return [x if y is seed else y.expand(x.shape) if repeated else y for y in copied]
