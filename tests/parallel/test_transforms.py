"""Transforms and tracers of torch: what goes through several replicas equals one device, the rest is a typed error."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.nn import functional as F

import everygpu
from everygpu import DataParallel, Replicated
from everygpu.errors import CallError, ModuleError

pytestmark = [
    pytest.mark.usefixtures("in_threads"),
    # torch scripts what dual numbers are decomposed by.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]

TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(lambda v: f(v).sum())(x),
}


class Mlp(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.double()


@pytest.fixture
def x():
    return torch.randn(5, 4, dtype=torch.float64)


def on(num, **options):
    return DataParallel(Mlp(), ["cpu"] * num, **options)


class TestRefused:
    @pytest.mark.parametrize("name", TRANSFORMS)
    def test_transforms_name_the_module(self, name, x):
        transform, model = TRANSFORMS[name], on(2)
        with pytest.raises(CallError, match=r"torch.func.*needs a module on one.*torch.func.vmap\(model.module\)"):
            transform(model, x)
        with pytest.raises(CallError, match="on one device"):
            transform(partial(model.call_method, "forward"), x)
        torch.testing.assert_close(transform(on(1), x), transform(model.module, x))

    def test_a_transform_beside_the_model_is_not_meant(self, x):
        model = on(2)
        assert torch.func.vmap(lambda v: v * 2)(x).equal(x * 2)
        torch.testing.assert_close(model(x), model.module(x))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit.*is deprecated:FutureWarning")
    def test_jit(self, x):
        with pytest.raises(CallError, match=r"torch.jit.trace needs.*torch.jit.trace\(model.module, x\)"):
            torch.jit.trace(on(2), x)
        for num in (1, 2):
            with pytest.raises(ModuleError, match=r"torch.jit.script needs.*torch.jit.script\(model.module\)"):
                torch.jit.script(on(num))

    def test_export(self, x):
        with pytest.raises(CallError, match=r"torch.export needs.*torch.export.export\(model.module, \(x,\)\)"):
            torch.export.export(on(2), (x,))

    def test_forward_mode_under_vmap(self, x):
        with pytest.raises(CallError, match="strategy='reverse-mode'"):
            jacobian(on(2), x, vectorize=True, strategy="forward-mode")
        ways = {"strategy": "reverse-mode", "vectorize": True}
        torch.testing.assert_close(jacobian(on(2), x, **ways), jacobian(Mlp(), x, **ways))


FUNCTIONS = {
    "output": lambda f, x: f(x),
    "mean": lambda f, x: f(x).square().mean(),
    "cross entropy": lambda f, x: F.cross_entropy(f(x), torch.tensor([0, 1, 2, 3, 0], device=x.device)),
    "softmax": lambda f, x: f(x).softmax(-1).log().sum(0),
    "two forwards": lambda f, x: f(f(x)),
    "parts": lambda f, x: f(x)[1:4] @ x.t(),
}


def tangent(function, x, direction):
    """Return a function's directional derivative at x, by dual numbers."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent


class TestForwardMode:
    @pytest.mark.parametrize("name", FUNCTIONS)
    @pytest.mark.parametrize("records", [True, False], ids=["grad", "no_grad"])
    def test_of_the_input(self, devices, name, records):
        used = devices(2)
        model, bare = DataParallel(Mlp().to(used[0]), used), Mlp().to(used[0])
        x, direction = torch.randn(2, 5, 4, dtype=torch.float64, device=used[0])
        with torch.set_grad_enabled(records):
            actual, expected = (tangent(partial(FUNCTIONS[name], f), x, direction) for f in (model, bare))
        torch.testing.assert_close(actual, expected)

    @pytest.mark.parametrize("gather", ["sharded", "joined"])
    def test_of_the_parameters(self, x, gather):
        model, bare = on(3, gather=gather), Mlp()

        def call(f, prefix):
            with forward_ad.dual_level():
                pairs = {prefix + k: (p.detach(), torch.ones_like(p)) for k, p in bare.named_parameters()}
                duals = {k: forward_ad.make_dual(*pair) for k, pair in pairs.items()}
                return forward_ad.unpack_dual(torch.func.functional_call(f, duals, (x,))).tangent

        torch.testing.assert_close(call(nn.Sequential(model), "0.module."), call(bare, ""))

    def test_of_replicated_values_and_losses_per_replica(self, x):
        class Loss(nn.Module):
            def forward(self, x, w):
                return (x * w).mean()

        model, w = DataParallel(Loss(), ["cpu"] * 2), torch.randn(4, dtype=torch.float64)
        for weights in (w, w.clone().requires_grad_()):
            actual = tangent(lambda v: model(x, Replicated(v)).mean(), weights, torch.ones_like(w))
            torch.testing.assert_close(actual.detach(), x.mean())

    def test_over_reverse_mode(self, x):
        def product(f):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
                (grad,) = torch.autograd.grad(f(dual).square().sum(), dual, create_graph=True)
                return forward_ad.unpack_dual(grad).tangent.detach()

        torch.testing.assert_close(product(on(2)), product(Mlp()))

    def test_synchronized_statistics(self, x):
        model = DataParallel(everygpu.SyncBatchNorm(4).double(), ["cpu"] * 2)
        with pytest.raises(CallError, match="SyncBatchNorm: forward-mode differentiation needs eval mode"):
            tangent(model, x, x)
        torch.testing.assert_close(tangent(model.eval(), x, x), x / (1 + model.module.eps) ** 0.5)

    def test_batches_print(self, x):
        with forward_ad.dual_level():
            assert "ShardedBatch" in type(out := on(2)(forward_ad.make_dual(x, x))).__name__
            assert "tangent" in str(out)


class TestBatchedGradients:
    @pytest.mark.parametrize("create_graph", [False, True])
    def test_of_parameters_and_inputs(self, devices, create_graph):
        used = devices(2)
        x = torch.randn(5, 4, dtype=torch.float64, device=used[0], requires_grad=True)
        seeds = torch.randn(3, 5, 4, dtype=torch.float64, device=used[0])

        def grads(model):
            ends = [x, *model.parameters()]
            return torch.autograd.grad(model(x), ends, seeds, is_grads_batched=True, create_graph=create_graph)

        model, bare = DataParallel(Mlp().to(used[0]), used), Mlp().to(used[0])
        for actual, expected in zip(grads(model), grads(bare), strict=True):
            torch.testing.assert_close(everygpu.gather(actual), expected)

    def test_under_vmap(self, x):
        def grads(model):
            out, params = model(x), list(model.parameters())
            return torch.func.vmap(lambda v: torch.autograd.grad(out, params, v, retain_graph=True))(
                torch.stack([x, -x])
            )

        torch.testing.assert_close(grads(on(2)), grads(Mlp()))
