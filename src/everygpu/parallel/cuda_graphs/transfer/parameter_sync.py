"""A module's trainable parameters on their way to all devices, within a recording, and their gradients' way back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from everygpu import comm
from everygpu.comm.streams import queueing_on, synchronize_streams
from everygpu.parallel.buckets.memory import Grads
from everygpu.parallel.buckets.plan import group_tensors
from everygpu.parallel.buckets.sizes import REPLICA_BYTES
from everygpu.parallel.cuda_graphs.transfer.backends import GradReducer
from everygpu.parallel.cuda_graphs.transfer.param_group import ParamGroup
from everygpu.parallel.replicas.replica_set import Leaves


class ParameterSync:
    """Trainable parameters in groups, in the order in which backward usually finishes them: the last ones first.

    One that comes late would hold up those after it.

    Args:
        params: On ``devices[0]``, dense.
        devices: One per replica.
        limit_bytes: Size at which a group is closed.
    """

    def __init__(
        self, params: Sequence[Tensor], devices: Sequence[torch.device], limit_bytes: int = REPLICA_BYTES
    ) -> None:
        self.params = list(params)
        self._devices = list(devices)
        self._layout_key = _layout_key(params)
        comm.connect(devices)
        backwards = self.params[::-1]
        groups = group_tensors(backwards, lambda p: p.dtype, limit_bytes)
        self._rooms = [torch.zeros(len(groups), dtype=torch.int64, device=d) for d in devices]
        self.groups = [
            ParamGroup([backwards[i] for i in members], devices, self._rooms, index)
            for index, members in enumerate(groups)
        ]
        self._load_kernels()

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Tell whether these are the parameters it was made for, where they were."""
        return _layout_key(params) == self._layout_key

    def twins(self) -> Leaves:
        """Return each parameter's twins on the devices after the first, by the parameter's ``id``."""
        return {id(p): twins for b in self.groups for p, *twins in zip(b.originals, *b.twins)}

    def send(self) -> None:
        """Bring the twins up to date, on the devices' current streams."""
        synchronize_streams(self._devices)
        for group in self.groups:
            group.backend.send()
        synchronize_streams(self._devices)

    def sent(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter with where ``send`` brings it on the second device; nothing where there is none."""
        return [pair for group in self.groups for pair in group.sent()]

    def make_reducers(self) -> list[GradReducer]:
        """Make what adds gradients up in one recording, for each group, before it begins."""
        return [group.backend.make_reducer() for group in self.groups]

    def make_room(self) -> None:
        """Make memory for the sums of a launch, or of ``add``, which will be the user's; before these."""
        addresses = torch.tensor([b.make_room() for b in self.groups], dtype=torch.int64, device="cpu")
        on_gpus = self._devices[0].type == "cuda"
        addresses = addresses.pin_memory() if on_gpus else addresses
        for d, table in zip(self._devices, self._rooms):
            with queueing_on(d):
                table.copy_(addresses, non_blocking=on_gpus)

    def add(self, grads: Sequence[Sequence[Grads]]) -> None:
        """Add gradients up that are no recording's; for each group and device."""
        for group, row in zip(self.groups, grads):
            group.add(row)

    @torch.no_grad()
    def _load_kernels(self) -> None:
        """Run everything once: kernels are compiled and loaded now, as while recording that may be forbidden."""
        self.send()
        self.make_room()
        for group, total in zip(self.groups, self.make_reducers()):
            total.take([[None] * len(group.originals)] * len(self._devices))
            total.write_tables()
            total.run()
        synchronize_streams(self._devices)  # before memory is let go that others write to
        self.totals([False] * len(self.params))

    def totals(self, reached: Sequence[bool]) -> list[Tensor | None]:
        """Return the last sums, in memory of their own on the first device, in the parameters' order.

        Args:
            reached: For each parameter of each group whether it has a gradient; others get None.
        """
        members = [p for group in self.groups for p in group.originals]
        sums = [t for group in self.groups for t in group.totals()]
        found = {id(p): t if is_reached else None for p, t, is_reached in zip(members, sums, reached)}
        return [found[id(p)] for p in self.params]


def _layout_key(params: Sequence[Tensor]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(id(p), p.data_ptr(), p.stride()) for p in params]
