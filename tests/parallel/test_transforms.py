"""Transforms and tracers of torch: what goes through several replicas equals one device, the rest is a typed error."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

import everygpu
from everygpu import DataParallel
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

    def test_forward_mode(self, x):
        def tangent(f):
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x))).tangent

        with pytest.raises(CallError, match=r"forward-mode .*torch.func.jvp\(model.module, \(x,\), \(v,\)\)"):
            tangent(on(2))
        torch.testing.assert_close(tangent(on(1)), tangent(Mlp()))
        with pytest.raises(CallError, match="on one device"):
            jacobian(on(2), x, vectorize=True, strategy="forward-mode")
        ways = {"strategy": "reverse-mode", "vectorize": True}
        torch.testing.assert_close(jacobian(on(2), x, **ways), jacobian(Mlp(), x, **ways))


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
            torch.testing.assert_close(everygpu.parallel.gather(actual), expected)

    def test_under_vmap(self, x):
        def grads(model):
            out, params = model(x), list(model.parameters())
            return torch.func.vmap(lambda v: torch.autograd.grad(out, params, v, retain_graph=True))(
                torch.stack([x, -x])
            )

        torch.testing.assert_close(grads(on(2)), grads(Mlp()))
