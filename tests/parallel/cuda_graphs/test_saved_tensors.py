"""``engine="graphs"``: what recordings find out of the tensors that a forward saves for its backward."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.parallel.cuda_graphs.recordable import find_watched
from tests.parallel.cuda_graphs.forwards import NUM_STEPS, Devices, check_grads, loss_of, make_batches


class Checkpointed(nn.Module):
    """Runs a norm again in backward, which changes its buffers once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(
            lambda h: self.norm(h).tanh(), self.first(x), use_reentrant=False, preserve_rng_state=False
        )
        out: Tensor = self.last(h)
        return out


def test_a_checkpoint_runs_again_in_backward_alone(recording: Devices) -> None:
    model = check_grads(recording, Checkpointed)
    threads = everygpu.DataParallel(Checkpointed().to(model.src_device_obj), model.replica_devices, engine="threads")
    for x, y in make_batches(NUM_STEPS):
        loss_of(threads(x), y).backward()
    torch.testing.assert_close(list(model.buffers()), list(threads.buffers()), rtol=1e-4, atol=1e-5)


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale, None)
        return x * scale

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (scale, _) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * scale, None


def test_saved_tensors_are_found_and_still_serve() -> None:
    w, a, b = torch.ones(3, requires_grad=True), torch.full((3,), 2.0), torch.full((3,), 3.0)
    out = torch.stack([Scaling.apply(w * a, b).exp(), w]).prod(0)
    found_watched = find_watched([out], [a, b, torch.ones(3)])
    assert [id(t) for t in found_watched] == [id(a), id(b)]
    again = torch.stack([(w * a * b).exp(), w]).prod(0)
    (wanted,) = torch.autograd.grad(again.sum(), w)
    (found,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(found, wanted)
