"""Parameters on their way to all devices, and gradients on their way back."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from everygpu.parallel.buckets import plan_buckets
from everygpu.parallel.cuda_graphs import transfer
from everygpu.parallel.cuda_graphs.transfer import lay_out

Devices = Callable[[int], list[torch.device]]


def test_what_kernels_do_not_know_is_refused(capturing: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    params, devices = [nn.Parameter(torch.zeros(3, dtype=torch.complex64))], capturing(2)
    assert transfer.why_not_sent(params, devices) is None
    params = [nn.Parameter(torch.zeros(3).to(torch.float8_e5m2), requires_grad=False)]
    assert "float8_e5m2" in str(transfer.why_not_sent(params, devices))
    assert transfer.why_not_sent(params, devices[:1]) is None
    monkeypatch.setattr(transfer, "has_kernels", lambda devices: False)
    assert "Triton" in str(transfer.why_not_sent([], devices))


def test_gradients_are_laid_out_as_their_slots():
    weight = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    (plan,) = plan_buckets([weight], 1)
    (slot,) = plan.slots
    fits = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert lay_out(fits, slot, weight.dtype, weight.device) is fits
    contiguous, expanded = torch.randn(4, 3, 2, 2), torch.ones(()).expand(4, 3, 2, 2)
    unaligned = torch.randn(49)[1:].as_strided(slot.shape, slot.strides)
    for grad in (contiguous, expanded, unaligned):
        laid = lay_out(grad, slot, weight.dtype, weight.device)
        assert laid.data_ptr() % 16 == 0
        assert laid.as_strided(slot.shape, slot.strides).equal(grad)
    assert lay_out(None, slot, weight.dtype, weight.device).equal(torch.zeros(48))
