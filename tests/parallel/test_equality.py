"""N replicas give what one device gives: outputs, gradients every way, buffers, higher derivatives, trained weights."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu import Replicated
from tests.parallel.oracle import TOLERANCE, Mlp, assert_same, assert_same_grads, forget, grads, pair, rows, score

pytestmark = [
    pytest.mark.usefixtures("in_threads"),
    # torch 2.11 says so of any sparse tensor, also of those whose checks are left out explicitly.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    # torch announces the end of the old weight_norm; people's models still have it.
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning"),
]

SIZES = [(7, 3), (2, 4), (12, 5)]
"""Rows and replicas: of all models the first, of ``IN_ALL_SIZES`` the others, too."""
IN_ALL_SIZES = ("mlp", "cnn", "lstm", "transformer", "tied", "sparse", "complex", "experts")


class Tied(nn.Module):
    """One weight used twice, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        assert self.head.weight is self.embed.weight
        return self.head(self.embed(ids).tanh())


class Recurrent(nn.Module):
    """Its state has the rows on another dimension."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, num_layers: int = 1) -> None:
        super().__init__()
        self.rnn = kind(3, 4, num_layers=num_layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, state = self.rnn(x)
        if lengths is not None:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            out, state = self.rnn(packed)
            out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return self.head(out), (state[0] if isinstance(state, tuple) else state).transpose(0, 1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(x, mask=mask)


class Words(nn.Module):
    """Has sparse gradients, and a dense one of the last of three shards, which begins with 7, where that is asked."""

    def __init__(self, *, is_mixed: bool = False) -> None:
        super().__init__()
        self.embed, self.bag = nn.Embedding(11, 4, sparse=True), nn.EmbeddingBag(11, 4, sparse=True, mode="sum")
        self.head, self.is_mixed = nn.Linear(4, 2), is_mixed

    def forward(self, ids: Tensor) -> Tensor:
        out = self.head(self.embed(ids).mean(1) + self.bag(ids))
        is_dense = self.is_mixed and int(ids[0, 0]) == 7
        return out + F.linear(self.embed.weight, self.embed.weight).sum() if is_dense else out


class ComplexMap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(4))
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = x.to(torch.complex128) @ self.spectrum.conj() + self.shift * self.phase
        return z.conj() * z.abs(), (z * self.spectrum[0]).imag


class Routed(nn.Module):
    """Rows above zero go through one layer, the others through another, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
        self.high = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        is_high = x[:, 0] > 0
        parts = [layer(x[mask]) for layer, mask in ((self.low, ~is_high), (self.high, is_high)) if bool(mask.any())]
        order = torch.cat([(~is_high).nonzero(), is_high.nonzero()]).flatten()
        return torch.cat(parts)[order.argsort()]


class Force(nn.Module):
    """Returns an energy and its gradient, as force fields do: backward inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        is_training = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x if x.requires_grad and is_training else x.detach().requires_grad_()
            energy = self.body(x).sum(1)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=is_training)
        return energy, force


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.body, self.use_reentrant = Mlp(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)


class Normalizing(Mlp):
    """Writes into its input, as image models do: ``x.div_(255)``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 1).div_(4).sub_(0.5))


class Lists(nn.Module):
    """Keeps its parameters in torch's containers."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.ones(3) * i for i in range(1, 4)])
        self.named = nn.ParameterDict({"a": torch.ones(3), "b": nn.Parameter(torch.ones(3) * 2)})
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.heads = nn.ModuleDict({"left": nn.Linear(3, 2)})

    def forward(self, x: Tensor) -> Tensor:
        assert (len(self.listed), sorted(self.named.keys())) == (3, ["a", "b"])
        for p in self.listed:
            x = x * p
        for name, p in self.named.items():
            x = torch.sin(x + p) if name == "a" else x * p
        for layer in self.layers:
            x = layer(x)
        return self.heads["left"](x)


def convolutional() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3))
    nn.init.normal_(net[1].running_mean)
    return net


def partly_frozen() -> nn.Module:
    net = Mlp()
    net.first.requires_grad_(False)
    net.second.bias.requires_grad_(False)
    return net


def of_weight(change: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(change(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def floats(*shape: int) -> Callable[[int], tuple[Any, ...]]:
    return lambda n: (torch.randn(n, *shape, dtype=torch.float64).requires_grad_(),)


def sorted_rows(n: int) -> tuple[Any, ...]:
    """The low rows first, so that only the last replicas use ``high``."""
    (x,) = floats(3)(n)
    return (x.detach().abs() * torch.where(torch.arange(n) < n * 0.6, -1, 1)[:, None],)


def masked_rows(n: int) -> tuple[Any, ...]:
    """Not with a causal mask: the encoder would notice, and leave the tensor itself out of the graph."""
    return (*floats(4, 8)(n), Replicated(torch.randn(4, 4, dtype=torch.float64).requires_grad_()))


def ids(n: int) -> tuple[Any, ...]:
    return (torch.arange(3 * n).reshape(n, 3) % 11,)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "mlp": (Mlp, floats(3)),
    "cnn": (lambda: convolutional().eval(), floats(2, 5, 5)),
    "lstm": (lambda: Recurrent(num_layers=2), floats(5, 3)),
    "gru": (lambda: Recurrent(nn.GRU), floats(5, 3)),
    "packed sequences": (Recurrent, lambda n: (*floats(5, 3)(n), torch.arange(n) % 5 + 1)),
    "transformer": (Masked, masked_rows),
    "tied": (Tied, ids),
    "sparse": (Words, ids),
    "complex": (ComplexMap, floats(3)),
    "experts": (Routed, sorted_rows),
    "one expert": (Routed, lambda n: tuple(x.abs() for x in sorted_rows(n))),
    "force": (Force, floats(3)),
    "force of plain rows": (Force, lambda n: tuple(x.detach() for x in floats(3)(n))),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), floats(3)),
    "reentrant checkpoint": (lambda: Checkpointed(use_reentrant=True), floats(3)),
    "normalizing": (Normalizing, floats(3)),
    "lists": (Lists, floats(3)),
    "partly frozen": (partly_frozen, floats(3)),
    "old spectral norm": (of_weight(torch.nn.utils.spectral_norm), floats(3)),
    "spectral norm": (of_weight(parametrizations.spectral_norm), floats(3)),
    "old weight norm": (of_weight(torch.nn.utils.weight_norm), floats(3)),
    "weight norm": (of_weight(parametrizations.weight_norm), floats(3)),
    "orthogonal": (of_weight(parametrizations.orthogonal), floats(3)),
}


def backward(m: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        m(*args)
    output = m(*args)
    score(output).backward()
    return output


def two_forwards(m: nn.Module, *args: Any) -> Any:
    """As GANs train, with an evaluation in between."""
    first = m(*args)
    with torch.no_grad():
        m(*args)
    second = m(*args)
    (score(first) * score(second)).backward()
    return second


def backward_of_the_first_after_the_second(m: nn.Module, *args: Any) -> Any:
    outputs = [m(*args) for _ in range(3)]
    for output in (outputs[1], outputs[2], outputs[0]):
        score(output).backward()
    return outputs


def backward_twice(m: nn.Module, *args: Any) -> Any:
    loss = score(m(*args))
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    return loss


def inputs_of_a_graph(m: nn.Module, *args: Any) -> Any:
    return backward(m, args[0].exp() if args[0].requires_grad else args[0], *args[1:])


def ends_of(m: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    values = [a.value if isinstance(a, Replicated) else a for a in args]
    return [e for e in (*m.parameters(), *values) if isinstance(e, Tensor) and e.requires_grad]


def autograd_grad(m: nn.Module, *args: Any) -> Any:
    found = torch.autograd.grad(score(m(*args)), ends_of(m, args), allow_unused=True)
    some = torch.autograd.grad(score(m(*args)), ends_of(m, args)[-1:], allow_unused=True)
    return [None if g is None else g.to_dense() if g.is_sparse else g for g in (*found, *some)]


def second_derivatives(m: nn.Module, *args: Any) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        found = torch.autograd.grad(score(m(*args)), ends_of(m, args), create_graph=True, allow_unused=True)
        assert all(g is None or g.requires_grad for g in found)
        sum(g.abs().square().sum() for g in found if g is not None).backward()
    return found


def training(m: nn.Module, *args: Any) -> Any:
    """Five steps; what optimizers do with sparse gradients is theirs."""
    optimizer, losses = torch.optim.SGD(m.parameters(), lr=0.01), []
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = score(m(*args)) / 100
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, [p.detach() for p in m.parameters()]


USES = [backward, two_forwards, backward_of_the_first_after_the_second, backward_twice, inputs_of_a_graph,
        autograd_grad, second_derivatives, training]  # fmt: skip
OFTEN = [two_forwards, autograd_grad, second_derivatives, training]
"""Of models that aren't in all sizes; the others differ from these in what ``backward`` is called for."""
ON_ONE_DEVICE = {
    "sparse": {second_derivatives},  # nor can a sparse gradient be differentiated again on one device
    "reentrant checkpoint": {autograd_grad, second_derivatives, backward_twice},
}
"""Uses that torch itself refuses, or that make no sense."""


def compare(use: Callable[..., Any], name: str, devices: list[torch.device], num_rows: int, **options: Any) -> None:
    make, batch = MODELS[name]
    model, bare = pair(make, devices, **options)
    seen = []
    for m in (model, bare):
        torch.manual_seed(1)
        args = batch(num_rows)
        values = [a.value if isinstance(a, Replicated) else a for a in args]
        leaves = [v.detach().to(devices[0]).requires_grad_(v.requires_grad) for v in values]
        given = [Replicated(v) if isinstance(a, Replicated) and m is model else v for a, v in zip(args, leaves)]
        seen.append([use(m, *given), grads(m), [v.grad for v in leaves], dict(m.named_buffers())])
    torch.testing.assert_close(*seen, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        (name, use)
        for name in MODELS
        for use in (USES if name in IN_ALL_SIZES else OFTEN)
        if use not in ON_ONE_DEVICE.get(name, ())
    ],
)
def test_equals_one_device(devices, name, use):
    for num_rows, count in SIZES if name in IN_ALL_SIZES else SIZES[:1]:
        compare(use, name, devices(count), num_rows)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "complex", "sparse", "tied"])
def test_without_rows(devs, name):
    compare(backward, name, devs, 0)
    compare(autograd_grad, name, devs, 0)


@pytest.mark.parametrize("split", ["even", [1.0, 3.0, 1.0], [0.01, 1.0, 1.0]])
def test_other_splits(devices, split):
    for num_rows in (1, 4, 9):
        compare(training, "mlp", devices(3), num_rows, split=split)


def for_each(use, model, bare, *args):
    """Use both in turn; compare what comes of it, and the gradients."""
    found = [use(m, *args) for m in (model, bare)]
    if found[1] is not None:
        torch.testing.assert_close(*found, **TOLERANCE)
    assert_same_grads(model, bare)


def accumulated_over_sizes(m, device):
    for num_rows in (7, 2, 5):
        score(m(rows(num_rows, 3, device=device))).backward()


def third_derivative(m, device):
    x = rows(5, 3, device=device).requires_grad_()
    value = score(m(x))
    for _ in range(3):
        found = torch.autograd.grad(value, [x, m.first.weight, m.second.weight], create_graph=True)
        value = sum(g.pow(3).sum() for g in found)
    value.backward()
    return found


def gradient_that_is_written(m, device):
    """Changing one gradient must not count as changing another that a graph has saved."""
    params = list(m.parameters())
    found = torch.autograd.grad(score(m(rows(7, 3, device=device))), params)
    loss = (params[0] * found[0]).sum()
    for g in found[1:]:
        g.zero_()
    loss.backward()


def weights_swapped_and_back(m, device):
    """As an exponential moving average is evaluated in the middle of a step."""
    student = m(rows(7, 3, device=device))
    kept = [p.data.clone() for p in m.parameters()]
    for p in m.parameters():
        p.data.mul_(0.5)
    with torch.no_grad():
        teacher = m(rows(7, 3, device=device))
    for p, old in zip(m.parameters(), kept):
        p.data.copy_(old)
    (student - teacher).square().sum().backward()


def gradient_penalty(m, device):
    """WGAN-GP: real, fake and mixed rows through one critic, the norm of its input gradient in the loss."""
    optimizer, losses = torch.optim.Adam(m.parameters(), lr=0.01), []
    for step in range(3):
        optimizer.zero_grad()
        real, fake = (rows(7, 3, device=device, seed=10 * step + k) for k in range(2))
        mixed = (real * 0.3 + fake * 0.7).requires_grad_()
        (g,) = torch.autograd.grad(m(mixed).sum(), mixed, create_graph=True)
        loss = m(fake).mean() - m(real).mean() + 10 * (g.norm(2, dim=1) - 1).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    "use",
    [accumulated_over_sizes, third_derivative, gradient_that_is_written, weights_swapped_and_back, gradient_penalty],
)
def test_gradients(model, bare, devs, use):
    for_each(use, model, bare, devs[0])


def test_gradgradcheck(model, devs):
    def call(x, *parameters):
        return model(x)  # the parameters are the model's own, which the check changes in place

    inputs = (rows(3, 3, device=devs[0]).requires_grad_(), *model.parameters())
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("again", [False, True], ids=["no forward since", "a forward since"])
def test_backward_after_an_in_place_change_is_torchs_error(model, bare, x, again):
    for m in (model, bare):
        loss = score(m(x))
        with torch.no_grad():
            m.second.weight.add_(1)
        if again:
            m(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert_same(model, bare, x)


def test_in_place_change_of_what_only_another_replica_saved(devices):
    """Replica 0 does not use ``high``: others go backward through the values of their forward."""
    devs = devices(2)
    model, bare = pair(Routed, devs)
    x = rows(8, 3, device=devs[0]).abs() * torch.tensor([[-1]] * 4 + [[1]] * 4, device=devs[0])
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
def test_backward_after_new_parameters_never_gives_a_wrong_number(model, bare, x, change):
    """On one device the old graph still has the old parameters. Here: the same numbers, or torch's error."""
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
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close([p.grad for p in kept[0]], [p.grad for p in kept[1]], **TOLERANCE)


class Inner(nn.Module):
    """Calls backward in forward, and takes gradients of the parameters it has there."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        self.body(x).square().sum().backward()
        own = torch.autograd.grad(self.body(x).square().sum(), list(self.body.parameters()))
        return x.new_tensor([[float(own[0].norm())]]).expand(len(x), 1)


def test_backward_called_inside_forward(devs, x):
    model, bare = pair(Inner, devs)
    norms = model(x)
    torch.testing.assert_close(norms, torch.cat([copy.deepcopy(bare)(shard) for shard in x.chunk(3)]), **TOLERANCE)
    bare(x)
    assert_same_grads(model, bare)


@pytest.mark.parametrize("outer", ["0.", "0.module."])
def test_functional_call_with_other_parameters(model, bare, x, outer):
    """As meta-learning does: gradients flow to the parameters put in place of the module's.

    torch refuses a ``DataParallel`` itself, its own as ours, but not a module with one in it.
    """
    with pytest.raises(RuntimeError, match="can't be used with nn.DataParallel"):
        torch.func.functional_call(model, {}, (x,))
    for m, prefix in ((nn.Sequential(model), outer), (bare, "")):
        names, params = zip(*bare.named_parameters()) if m is bare else zip(*model.module.named_parameters())
        inner = torch.autograd.grad(score(m(x)), params, create_graph=True)
        fast = {prefix + n: p - 0.01 * g for n, p, g in zip(names, params, inner)}
        score(torch.func.functional_call(m, fast, (x,))).backward()
    assert_same_grads(model, bare)
    assert_same(model, bare, x)


def test_sparse_and_dense_gradients_of_one_parameter(devs):
    model, bare = pair(functools.partial(Words, is_mixed=True), devs)
    (given,) = ids(7)
    given = given.to(devs[0])
    score(model(given)).backward()
    score(torch.cat([bare(shard) for shard in given.chunk(len(devs))])).backward()
    assert_same_grads(model, bare)
    assert model.bag.weight.grad.is_sparse


def test_rows_of_a_table_that_forward_shortens(devices):
    """The replicas shorten the rows that they look up; those of the first replica stay so."""
    devs = devices(2)
    model, bare = pair(lambda: nn.Embedding(8, 3, max_norm=0.1), devs)
    index = torch.arange(8, device=devs[0])
    torch.testing.assert_close(model(index), bare(index), **TOLERANCE)
    first = len(index.chunk(len(devs))[0])
    torch.testing.assert_close(model.module.weight[:first], bare.weight[:first], **TOLERANCE)
    assert (model.module.weight[first:].norm(dim=1) > 0.1).all()


def test_tensors_of_every_dtype_travel_unchanged(devs):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                self.register_parameter("p_" + str(dtype)[6:], nn.Parameter(torch.arange(5, dtype=dtype)))
            for dtype in (torch.int8, torch.int64, torch.bool, torch.complex64):
                self.register_buffer("b_" + str(dtype)[6:], torch.arange(5).to(dtype))
            self.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
            self.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))

        def forward(self, x):
            own = [*self.parameters(), *self.buffers()]
            return [str(t.dtype) for t in own], [t.tolist() for t in own], [tuple(t.shape) for t in own]

    module = Mixed().to(devs[0])
    assert everygpu.DataParallel(module, devs)(rows(6, 2, device=devs[0])) == module(None)


@pytest.mark.parametrize("rule", ["first", "mean"])
@pytest.mark.parametrize("num_rows", [8, 23])
def test_batchnorm_in_training_follows_the_buffer_rule(devs, num_rows, rule):
    model, bare = pair(convolutional, devs, buffers=rule)
    for step in range(3):
        x = rows(num_rows, 2, 5, 5, device=devs[0], seed=step)
        shards = x.chunk(len(devs))
        alone = [copy.deepcopy(bare) for _ in shards]
        expected = torch.cat([net(shard) for net, shard in zip(alone, shards)])
        forget(model, *alone)
        out = model(x)
        torch.testing.assert_close(out, expected)
        score(out).backward()
        score(expected).backward()
        for mine, *theirs in zip(model.parameters(), *(net.parameters() for net in alone)):
            torch.testing.assert_close(mine.grad, sum(p.grad for p in theirs))
        for name, mine in model.named_buffers():
            theirs = [net.get_buffer(name) for net in alone]
            is_mean = rule == "mean" and mine.is_floating_point()
            mean = sum(t * (len(shard) / num_rows) for t, shard in zip(theirs, shards)) if is_mean else theirs[0]
            torch.testing.assert_close(mine, mean)
        bare.load_state_dict(model.state_dict())
