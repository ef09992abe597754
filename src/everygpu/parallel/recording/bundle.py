"""Trainable parameters that travel together within a recording, and their gradients on the way back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from everygpu import comm
from everygpu.parallel.broadcast import ALIGNMENT_BYTES, Look, aligned_offsets, dense_strides, group

Grads = Sequence[Tensor | None]


class Bundle:
    """Parameters of one dtype, with a leaf twin of each on every device after the first, in flat memory that stays.

    A flat buffer's chunks are as many equal parts of it as there are devices: each device adds up and passes on its
    own, so that all links between GPUs are busy.

    Args:
        originals: On ``devices[0]``, dense.
        devices: One per replica.
    """

    def __init__(self, originals: Sequence[Tensor], devices: Sequence[torch.device]) -> None:
        self.originals = list(originals)
        self._devices = list(devices)
        self._metas = [(t.shape, dense_strides(t)) for t in originals]
        self._offsets, end = aligned_offsets(originals)
        step = len(devices) * ALIGNMENT_BYTES // originals[0].element_size()  # chunks are aligned, too
        numel = -(-end // step) * step
        self._values = [torch.zeros(numel, dtype=originals[0].dtype, device=d) for d in devices]
        self._sums = [torch.zeros_like(flat) for flat in self._values]
        self._arrivals = [torch.zeros_like(flat.chunk(len(devices))[0]) for flat in self._values]
        # .data gives each a version counter of its own.
        self.twins = [
            [Look(t).on(view.data).requires_grad_() for t, view in zip(originals, self._views(flat))]
            for flat in self._values[1:]
        ]

    def leaves(self) -> list[list[Tensor]]:
        """Return for each device what a recording takes gradients of.

        On the first device not the parameters themselves, but leaves of the same memory, which count writes together:
        autograd accumulates the parameters' gradients on streams that are none of the recording's.
        """
        return [[Look(t).on(t.detach()).requires_grad_() for t in self.originals], *self.twins]

    def send(self) -> None:
        """Bring the twins up to date."""
        if len(self._devices) == 1:
            return
        home, others = self._values[0], self._values[1:]
        torch._foreach_copy_(self._views(home), [t.detach() for t in self.originals])
        chunks = [flat.chunk(len(self._devices))[j + 1] for j, flat in enumerate(others)]
        for chunk, target in zip(home.chunk(len(self._devices))[1:], chunks):
            comm.fill(target, chunk)
        comm.all_gather(self._values)

    def reduce(self, grads: Sequence[Grads]) -> None:
        """Add gradients up, on the current streams, without making memory there: see ``DeviceGraph.record``.

        Args:
            grads: For each device those of its parameters, None where one took no part.
        """
        for flat, row in zip(self._sums, grads):
            pairs = [(view, g) for view, g in zip(self._views(flat), row) if g is not None]
            if len(pairs) < len(row):
                flat.zero_()
            if pairs:
                torch._foreach_copy_([view for view, _ in pairs], [g for _, g in pairs])
        # From here on the j-th chunks are device j's.
        columns = list(zip(*(flat.chunk(len(self._devices)) for flat in self._sums)))
        for j, (column, arrival) in enumerate(zip(columns, self._arrivals)):
            for theirs in (*column[:j], *column[j + 1 :]):
                comm.fill(arrival, theirs)
                column[j].add_(arrival)
        for j, (home, *_) in enumerate(columns[1:], 1):
            comm.fill(home, columns[j][j])

    def totals(self) -> list[Tensor]:
        """Return the sums of the last ``reduce``, in memory of their own on the first device."""
        return self._views(self._sums[0].clone())

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat.as_strided(*meta, offset) for meta, offset in zip(self._metas, self._offsets)]


def bundle_up(params: Sequence[Tensor], devices: Sequence[torch.device], limit_bytes: int) -> list[Bundle]:
    """Put parameters of one dtype together, up to a size per bundle.

    Returns:
        Bundles in the order in which backward usually finishes them: the last parameters first. One that comes late
        would hold up those after it.
    """
    backwards = params[::-1]
    groups = group(backwards, lambda p: p.dtype, limit_bytes)
    return [Bundle([backwards[i] for i in members], devices) for members in groups]
