"""Gradients: what backward may rely on, and higher derivatives."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.oracle import TOLERANCE, Mlp, assert_same, assert_same_grads, grads, pair, rows, score

pytestmark = pytest.mark.usefixtures("in_threads")

IN_PLACE = "modified by an inplace operation"
"""From torch's error when a tensor that backward needs has been written since."""


def fresh(model, bare):
    """Forget the gradients of both."""
    for m in (model, bare):
        m.zero_grad()


def test_two_forwards_before_one_backward(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    for m in (model, bare):
        first = m(rows(7, 3, device=devs[0], seed=1))
        with torch.no_grad():
            m(rows(4, 3, device=devs[0], seed=2))
        m.eval()
        second = m(rows(5, 3, device=devs[0], seed=3))
        (score(first) * score(second)).backward()
    assert_same_grads(model, bare)


def test_backward_of_the_first_forward_after_the_second(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    for m in (model, bare):
        outputs = [m(rows(7, 3, device=devs[0], seed=seed)) for seed in range(3)]
        for output in (outputs[1], outputs[2], outputs[0]):
            score(output).backward()
    assert_same_grads(model, bare)


@pytest.mark.parametrize("again", [False, True], ids=["no forward since", "a forward since"])
def test_backward_after_an_in_place_change_is_torchs_error(devices, again):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    x = rows(7, 3, device=devs[0])
    for m in (model, bare):
        loss = score(m(x))
        with torch.no_grad():
            m.second.weight.add_(1)
        if again:
            m(x)
        with pytest.raises(RuntimeError, match=IN_PLACE):
            loss.backward()
    fresh(model, bare)
    assert_same(model, bare, x)


class Routed(nn.Module):
    """Rows above zero go through one layer, the others through another, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
        self.high = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, x):
        is_high = x[:, 0] > 0
        parts = [layer(x[mask]) for layer, mask in ((self.low, ~is_high), (self.high, is_high)) if bool(mask.any())]
        order = torch.cat([(~is_high).nonzero(), is_high.nonzero()]).flatten()
        return torch.cat(parts)[order.argsort()]


def routed_batch(device):
    """All low rows first, so that only replicas after the first use ``high``."""
    x = rows(8, 3, device=device).abs()
    x[:5] *= -1
    return x


def test_parameters_that_only_some_replicas_use(devices):
    devs = devices(2)
    model, bare = pair(Routed, devs)
    assert_same(model, bare, routed_batch(devs[0]))
    fresh(model, bare)
    assert_same(model, bare, routed_batch(devs[0]).abs())
    assert grads(model.module)["high.0.weight"] is not None


def test_parameters_that_no_replica_uses_have_no_gradient(devices):
    devs = devices(3)
    model, bare = pair(Routed, devs)
    run = assert_same(model, bare, rows(7, 3, device=devs[0]).abs())
    assert run.param_grads["low.0.weight"] is None


def test_in_place_change_of_what_only_another_replica_saved(devices):
    """Replica 0 does not use ``high``: others go backward through the values of their forward."""
    devs = devices(2)
    model, bare = pair(Routed, devs)
    x = routed_batch(devs[0])
    x[:4], x[4:] = x[:4], x[4:].abs()
    loss = score(model(x))
    with torch.no_grad():
        model.module.high[2].weight.add_(1)
    model(x)
    loss.backward()
    score(bare(x)).backward()
    assert_same_grads(model, bare)


def assign(m):
    m.second.weight = nn.Parameter(m.second.weight.detach() + 1)
    m.first.weight = nn.Parameter(m.first.weight.detach() * 2)


def load_assigning(m):
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [assign, load_assigning])
def test_backward_after_new_parameters_never_gives_a_wrong_number(devices, change):
    """On one device the old graph still has the old parameters. Here: the same numbers, or torch's error."""
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    x = rows(7, 3, device=devs[0])
    kept, losses = [], []
    for m in (model, bare):
        change(m)  # parameters as new as those that come later: the same version counters
        kept.append(list(m.parameters()))
        losses.append(score(m(x)))
        change(m)
        m(x)
    losses[1].backward()
    try:
        losses[0].backward()
    except RuntimeError as error:
        assert IN_PLACE in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close([p.grad for p in kept[0]], [p.grad for p in kept[1]], **TOLERANCE)


def test_weights_swapped_through_data_and_back_between_forward_and_backward(devices):
    """As an exponential moving average is evaluated in the middle of a step."""
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    x = rows(7, 3, device=devs[0])
    for m in (model, bare):
        student = m(x)
        kept = [p.data.clone() for p in m.parameters()]
        for p in m.parameters():
            p.data.mul_(0.5)
        with torch.no_grad():
            teacher = m(x)
        for p, old in zip(m.parameters(), kept):
            p.data.copy_(old)
        (student - teacher).square().sum().backward()
    assert_same_grads(model, bare)


def test_gradients_accumulate_over_backwards(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    for m in (model, bare):
        for seed in range(3):
            score(m(rows(7 - seed, 3, device=devs[0], seed=seed))).backward()
    assert_same_grads(model, bare)


def test_gradients_are_independent_tensors(devices):
    """Changing one gradient must not count as changing another that a graph has saved."""
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    for m in (model, bare):
        params = list(m.parameters())
        found = torch.autograd.grad(score(m(rows(7, 3, device=devs[0]))), params)
        loss = (params[0] * found[0]).sum()
        for g in found[1:]:
            g.zero_()
        loss.backward()
    assert_same_grads(model, bare)


def test_retain_graph(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    for m in (model, bare):
        loss = score(m(rows(7, 3, device=devs[0])))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_same_grads(model, bare)


@pytest.mark.parametrize("create_graph", [False, True])
def test_autograd_grad_of_parameters(devices, create_graph):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    x = rows(7, 3, device=devs[0])
    found = [torch.autograd.grad(score(m(x)), list(m.parameters()), create_graph=create_graph) for m in (model, bare)]
    torch.testing.assert_close(*found, **TOLERANCE)
    assert all(g.requires_grad is create_graph for g in found[0])
    some = [torch.autograd.grad(score(m(x)), [m.second.weight], create_graph=create_graph) for m in (model, bare)]
    torch.testing.assert_close(*some, **TOLERANCE)


def test_double_backward_through_parameters_and_inputs(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    inputs = [rows(7, 3, device=devs[0]).requires_grad_() for _ in range(2)]
    for m, x in zip((model, bare), inputs):
        first = torch.autograd.grad(score(m(x)), [x, *m.parameters()], create_graph=True)
        sum(g.square().sum() for g in first).backward()
    assert_same_grads(model, bare)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **TOLERANCE)


def test_third_derivative(devices):
    devs = devices(2)
    model, bare = pair(Mlp, devs)
    found = []
    for m in (model, bare):
        x = rows(5, 3, device=devs[0]).requires_grad_()
        value = score(m(x))
        for _ in range(3):
            g = torch.autograd.grad(value, [x, m.first.weight, m.second.weight], create_graph=True)
            value = sum(t.pow(3).sum() for t in g)
        found.append(g)
    torch.testing.assert_close(*found, **TOLERANCE)


def test_hessian_vector_product(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    products = []
    for m in (model, bare):
        params = list(m.parameters())
        first = torch.autograd.grad(score(m(rows(7, 3, device=devs[0]))), params, create_graph=True)
        along = sum((g * p.detach().cos()).sum() for g, p in zip(first, params))
        products.append(torch.autograd.grad(along, params))
    torch.testing.assert_close(*products, **TOLERANCE)


@pytest.mark.parametrize("steps", [3])
def test_gradient_penalty(devices, steps):
    """WGAN-GP: real, fake and mixed rows through one critic, the norm of its input gradient in the loss."""
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, bare)]
    for step in range(steps):
        losses = []
        for m, optimizer in zip((model, bare), optimizers):
            optimizer.zero_grad()
            real, fake = (rows(7, 3, device=devs[0], seed=10 * step + k) for k in range(2))
            mixed = (real * 0.3 + fake * 0.7).requires_grad_()
            (g,) = torch.autograd.grad(m(mixed).sum(), mixed, create_graph=True)
            penalty = (g.norm(2, dim=1) - 1).square().mean()
            loss = m(fake).mean() - m(real).mean() + 10 * penalty
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, **TOLERANCE)
        assert_same_grads(model, bare)
        for optimizer in optimizers:
            optimizer.step()


class Force(nn.Module):
    """Returns an energy and its gradient, as force fields do: backward inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.body(x).sum(1)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=torch.is_grad_enabled())
        return energy, force


@pytest.mark.parametrize("requires_grad", [False, True])
def test_gradient_taken_inside_forward(devices, requires_grad):
    devs = devices(3)
    model, bare = pair(Force, devs)
    for seed in range(2):
        fresh(model, bare)
        assert_same(model, bare, rows(7, 3, device=devs[0], seed=seed).requires_grad_(requires_grad))
    with torch.no_grad():
        x = rows(7, 3, device=devs[0])
        torch.testing.assert_close(model(x), bare(x), **TOLERANCE)


class Inner(nn.Module):
    """Calls backward in forward, and takes gradients of the parameters it has there."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x):
        self.body(x).square().sum().backward()
        own = torch.autograd.grad(self.body(x).square().sum(), list(self.body.parameters()))
        return x.new_tensor([[float(own[0].norm())]]).expand(len(x), 1)


def test_backward_called_inside_forward(devices):
    devs = devices(3)
    model, bare = pair(Inner, devs)
    x = rows(7, 3, device=devs[0])
    norms = model(x)
    shards = x.chunk(len(devs))
    expected = torch.cat([copy.deepcopy(bare)(shard) for shard in shards])
    bare(x)
    torch.testing.assert_close(norms, expected, **TOLERANCE)
    assert_same_grads(model, bare)


@pytest.mark.parametrize("num_rows", [2, 3])
def test_gradgradcheck(devices, num_rows):
    devs = devices(2)
    model, _ = pair(Mlp, devs)
    x = rows(num_rows, 3, device=devs[0]).requires_grad_()

    def call(x, *parameters):
        return model(x)  # the parameters are the model's own, which the check changes in place

    inputs = (x, *model.parameters())
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_functional_call_with_other_parameters(devices):
    """As meta-learning does: gradients flow to the parameters put in place of the module's.

    torch refuses a ``DataParallel`` itself, its own as ours, but not a module with one in it.
    """
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    x = rows(7, 3, device=devs[0])
    with pytest.raises(RuntimeError, match="can't be used with nn.DataParallel"):
        torch.func.functional_call(model, {}, (x,))
    for m, prefix in ((nn.Sequential(model), "0.module."), (bare, "")):
        names, params = zip(*bare.named_parameters()) if m is bare else zip(*model.module.named_parameters())
        inner = torch.autograd.grad(score(m(x)), params, create_graph=True)
        fast = {prefix + n: p - 0.01 * g for n, p, g in zip(names, params, inner)}
        score(torch.func.functional_call(m, fast, (x,))).backward()
    assert_same_grads(model, bare)
    fresh(model, bare)
    assert_same(model, bare, x)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant) -> None:
        super().__init__()
        self.body = Mlp()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(devices, use_reentrant):
    devs = devices(3)
    model, bare = pair(lambda: Checkpointed(use_reentrant), devs)
    assert_same(model, bare, rows(7, 3, device=devs[0]).requires_grad_())
    fresh(model, bare)
    for m in (model, bare):
        outputs = [m(rows(7, 3, device=devs[0], seed=seed).requires_grad_()) for seed in range(2)]
        (score(outputs[0]) * score(outputs[1])).backward()
    assert_same_grads(model, bare)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_with_an_evaluation_before_backward(devices, use_reentrant):
    devs = devices(3)
    model, bare = pair(lambda: Checkpointed(use_reentrant), devs)
    for m in (model, bare):
        output = m(rows(7, 3, device=devs[0]).requires_grad_())
        with torch.no_grad():
            m(rows(7, 3, device=devs[0], seed=2).requires_grad_())
        score(output).backward()
    assert_same_grads(model, bare)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        assert self.head.weight is self.embed.weight
        return self.head(self.embed(ids).tanh())


def test_tied_weights(devices):
    devs = devices(3)
    model, bare = pair(Tied, devs)
    ids = torch.arange(21, device=devs[0]).reshape(7, 3) % 11
    assert_same(model, bare, ids)
    for m in (model, bare):
        first = torch.autograd.grad(score(m(ids)), list(m.parameters()), create_graph=True)
        sum(g.square().sum() for g in first).backward()
    assert_same_grads(model, bare)


def test_frozen_parameters_get_no_gradient(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    for m in (model, bare):
        m.first.requires_grad_(False)
    run = assert_same(model, bare, rows(7, 3, device=devs[0]).requires_grad_())
    assert run.param_grads["first.weight"] is None
    for m in (model, bare):
        m.first.requires_grad_(True)
        m.second.bias.requires_grad_(False)
        m.zero_grad()
    assert_same(model, bare, rows(7, 3, device=devs[0]))


def test_inputs_that_are_part_of_a_graph(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    leaves = [rows(7, 3, device=devs[0]).requires_grad_() for _ in range(2)]
    for m, leaf in zip((model, bare), leaves):
        score(m(leaf.exp()[:, [2, 0, 1]])).backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, **TOLERANCE)
    assert_same_grads(model, bare)
