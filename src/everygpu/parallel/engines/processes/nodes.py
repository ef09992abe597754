"""The nodes of autograd that stand for a helper's call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from everygpu.parallel.engines.processes.remote_call import RemoteCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A bucket's gradients on the primary device, or on their way there."""

    copied: "tuple[Tensor, torch.cuda.Event | None] | None" = None
    """Side by side, for ``comm.received``."""
    present: Sequence[bool] = ()
    """Which parameters have a gradient."""
    sparse: Mapping[int, Tensor] = field(default_factory=dict)
    """Sparse gradients, by the parameter's place in the bucket."""
    grads: Sequence[Tensor | None] = ()
    """One by one, where they are to be differentiated again."""


class OutputsNode(torch.autograd.Function):
    """Begins the backward of a call."""

    @staticmethod
    def forward(ctx: Any, call: "RemoteCall", outputs: list[Tensor], *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.num_anchors = len(anchors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.call.begin_backward(grads)
        return (None, None, *(torch.empty(0, device=ctx.call.helper.device) for _ in range(ctx.num_anchors)))


class ArrivalNode(torch.autograd.Function):
    """Sends the gradients of a bucket ahead to the primary device."""

    @staticmethod
    def forward(ctx: Any, call: "RemoteCall", bucket: int, anchor: Tensor) -> Tensor:
        ctx.call, ctx.bucket, ctx.device = call, bucket, anchor.device
        return torch.empty(0, device=call.helper.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        ctx.call.send_bucket(ctx.bucket, ctx.device)
        return None, None, torch.empty(0, device=ctx.device)


class InputsNode(torch.autograd.Function):
    """Gives the gradients of the arguments."""

    @staticmethod
    def forward(ctx: Any, call: "RemoteCall", *inputs: Tensor) -> Tensor:
        ctx.call = call
        return torch.empty(0, device=call.helper.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.call.grads_of_inputs())


class ParametersNode(torch.autograd.Function):
    """Gives the gradients of a bucket's parameters, one by one."""

    @staticmethod
    def forward(ctx: Any, call: "RemoteCall", bucket: int, *parameters: Tensor) -> Tensor:
        ctx.call, ctx.bucket = call, bucket
        return torch.empty(0, device=call.helper.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.call.grads_of_bucket(ctx.bucket))
