"""Logits, and other large products at a model's end, that recordings leave out."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from everygpu.parallel import switches
from everygpu.parallel.cuda_graphs import deferred_linear
from everygpu.parallel.cuda_graphs.deferred_linear import DeferredLinears, LinearCall, linear
from tests.parallel.cuda_graphs import training
from tests.parallel.cuda_graphs.training import Negate

Devices = Callable[[int], list[torch.device]]

VOCABULARY, WIDTH, LENGTH = 40, 8, 5


@pytest.fixture
def recording(either_way: Devices, monkeypatch: pytest.MonkeyPatch) -> Devices:
    """``devices`` on which forwards are recorded, and every product counts as large."""
    monkeypatch.setattr(deferred_linear, "is_large", lambda *_: True)
    return either_way


class Tied(nn.Module):
    """A language model whose head's weight is its embedding's."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.hidden(ids))

    def hidden(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.body(self.tokens(ids)))


class Biased(Tied):
    """With a bias."""

    def __init__(self) -> None:
        super().__init__(bias=True)


class Frozen(Tied):
    """With a head of its own that isn't trained."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)


class Result(NamedTuple):
    logits: Tensor
    hidden: Tensor
    again: Tensor


class Several(Tied):
    """Returns two products, one of them twice, and what one is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Any:
        h = self.hidden(ids)
        logits = self.head(h)
        return {"result": Result(logits, h, logits), "other": self.other(h)}


class Used(Tied):
    """Goes on with its logits."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids)).float() / 2


class Late(Tied):
    """Asks for its product only after what went into it was written."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.hidden(ids).detach()
        logits = self.other(h)
        h.zero_()
        return logits + self.head(self.hidden(ids))

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)


class Cast(Tied):
    """Computes its product under settings of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.hidden(ids)
        with torch.autocast(h.device.type, torch.bfloat16):
            return self.head(h)


class Counted(Tied):
    """Asks for its product where no gradients are recorded."""

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.hidden(ids))
        with torch.no_grad():
            best = logits.argmax(-1)
        return Result(logits, best, best)


class Custom(Tied):
    """Goes on by a function of its own."""

    def forward(self, ids: Tensor) -> Any:
        return Negate.apply(self.head(self.hidden(ids)))  # type: ignore[no-untyped-call]


class Catching(Tied):
    """Has another way where its product can't be used, which there is only in a recording."""

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.hidden(ids))
        try:
            with torch.no_grad():
                largest = logits.max()
        except everygpu.EveryGPUError:
            return logits
        return logits / largest.abs()


KEPT: list[Tensor] = []


class Keeping(Tied):
    """Keeps its logits."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        KEPT[:] = [*KEPT[-3:], logits]
        return logits


class Replaced(Tied):
    """Has a head whose forward was replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.head.forward = lambda x: F.linear(x, self.tokens.weight) * 2  # type: ignore[method-assign]


def loss_of(output: Any, y: Tensor) -> Tensor:
    if isinstance(output, dict):
        result, other = output["result"], output["other"]
        weights = torch.linspace(0, 1, WIDTH, device=y.device)
        found = loss_of(result.logits, y) + 2 * loss_of(result.again, y) + 3 * loss_of(other, y)
        return found + (everygpu.gather(result.hidden).to(y.device) * weights).mean()
    logits = output.logits if isinstance(output, Result) else output
    return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten().to(logits.device))


def train(make: Callable[[], nn.Module], used: list[torch.device], **options: Any) -> tuple[Any, list[Tensor]]:
    make_optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
    return training.train(make, used, loss_of, make_optimizer, shape=(6, LENGTH), vocabulary=VOCABULARY, **options)


def products_of(model: Any) -> list[LinearCall]:
    """List the products that launches of the model's recording compute."""
    assert model._engine.recorder is not None
    (found,) = model._engine.recorder.capture._recordings.values()
    return [x for _, x in everygpu.tree.leaves(found.recorded.outputs, "") if isinstance(x, LinearCall)]


def check(make: Callable[[], nn.Module], used: list[torch.device], num_products: int, **options: Any) -> None:
    """Compare losses and parameters with those of threads; ``num_products`` for each replica must be left out."""
    plain, ours = (train(make, used, engine=engine, **options) for engine in ("threads", "graphs"))
    training.compare(ours, plain)
    assert len(products_of(ours[0])) == num_products * len(used)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", [Tied, Biased, Frozen])
def test_a_last_product_is_left_out(recording: Devices, make: Any, count: int) -> None:
    check(make, recording(count), 1)


def test_switched_off_it_is_recorded(recording: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "DEFERS_LINEAR", False)
    check(Tied, recording(2), 0)


def test_several(recording: Devices) -> None:
    check(Several, recording(2), 3)


def test_outputs_that_are_joined(recording: Devices) -> None:
    check(Tied, recording(2), 1, gather="joined")


@pytest.mark.parametrize("make", [Used, Cast, Replaced])
def test_what_is_used_within_is_recorded(recording: Devices, make: Any) -> None:
    check(make, recording(2), 0)


def test_layers_that_were_changed_all_together(recording: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: F.linear(x, layer.weight, layer.bias) * 2)
    check(Tied, recording(2), 0)


@pytest.mark.parametrize("make", [Late, Counted, Keeping, Custom, Catching])
def test_where_it_cannot_wait_everything_is_recorded(recording: Devices, make: Any) -> None:
    try:
        check(make, recording(2), 0)
    finally:
        KEPT.clear()


def test_small_ones_are_recorded(either_way: Devices) -> None:
    check(Tied, either_way(2), 0)


def test_under_autocast(recording: Devices) -> None:
    used = recording(2)
    with torch.autocast(used[0].type, torch.bfloat16):
        model, _ = train(Tied, used, engine="graphs")
        output = model(torch.zeros(6, LENGTH, dtype=torch.int64, device=used[0]))
    assert len(products_of(model)) == 2
    assert output.dtype is torch.bfloat16


def test_what_launches_return_is_the_users(recording: Devices) -> None:
    used = recording(2)
    model, _ = train(Tied, used, engine="graphs")
    x = torch.arange(6 * LENGTH, device=used[0]).reshape(6, LENGTH) % VOCABULARY
    first = model(x)
    kept = everygpu.gather(first).detach().clone()
    first.sum().backward()
    second = model(x.flip(1))
    torch.testing.assert_close(everygpu.gather(first), kept)
    torch.testing.assert_close(everygpu.gather(second), kept.flip(1))


def test_gradients_of_some_and_of_all(recording: Devices) -> None:
    """Which outputs are used may change from step to step."""
    used = recording(2)
    results = []
    for engine in ("threads", "graphs"):
        model, _ = train(Several, used, engine=engine)
        grads = []
        for names in (["logits"], ["hidden"], ["again", "hidden"], ["logits"]) * 3:
            model.zero_grad()
            result = model(torch.zeros(6, LENGTH, dtype=torch.int64, device=used[0]))["result"]
            sum(everygpu.gather(getattr(result, name)).square().mean() for name in names).backward()  # type: ignore[union-attr]
            grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        results.append(grads)
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


class TestPostponed:
    """What stands for a product until somebody asks for it."""

    @pytest.fixture(autouse=True)
    def large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deferred_linear, "is_large", lambda *_: True)

    @pytest.fixture
    def layer(self) -> nn.Linear:
        return nn.Linear(4, 3)

    @pytest.fixture
    def products(self, layer: nn.Linear) -> Iterator[DeferredLinears]:
        products = DeferredLinears()
        with products.watched([layer]):
            yield products

    def test_it_is_computed_once(self, layer: nn.Linear, products: DeferredLinears) -> None:
        x = torch.randn(2, 4, requires_grad=True)
        out = layer(x)
        assert type(out) is not Tensor
        expected = F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(out + 0, expected)
        assert (out + 0).grad_fn is not None
        assert out.shape == (2, 3)
        assert out.data_ptr() == out.data_ptr()
        assert products.take([out]) == [products.take([out])[0]]
        assert type(products.take([out])[0]) is Tensor

    def test_copies_and_numpy(self, layer: nn.Linear, products: DeferredLinears) -> None:
        x = torch.randn(2, 4)
        expected = F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(torch.cat([layer(x), layer(x)]), torch.cat([expected] * 2))
        torch.testing.assert_close(torch.from_numpy(layer(x).detach().numpy()), expected.detach())
        torch.testing.assert_close(copy.deepcopy(layer(x).detach()), expected.detach())

    def test_operators_that_see_no_function_fail(self, layer: nn.Linear, products: DeferredLinears) -> None:
        out = layer(torch.randn(2, 4))
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(everygpu.EveryGPUError, match="past torch"):
            torch.neg(out)

    def test_compiled_code(self, layer: nn.Linear, products: DeferredLinears) -> None:
        """It is refused, and what was compiled goes on to be used."""
        calls: list[int] = []
        torch._dynamo.reset()
        negate = torch.compile(lambda t: 0 - t, backend=lambda graph, _: lambda *a: calls.append(1) or graph(*a))
        x = torch.randn(2, 4)
        for _ in range(2):
            with pytest.raises(Exception, match="compiled code"):
                negate(layer(x))
        torch.testing.assert_close(negate(x), -x)
        assert calls

    def test_other_settings(self, layer: nn.Linear, products: DeferredLinears) -> None:
        with torch.no_grad():
            assert type(layer(torch.randn(2, 4))) is Tensor
        out = layer(torch.randn(2, 4))
        with torch.no_grad(), pytest.raises(everygpu.EveryGPUError, match="other settings"):
            out.neg()

    @pytest.mark.parametrize("asks", [True, False])
    def test_operands_that_are_written(self, layer: nn.Linear, products: DeferredLinears, asks: bool) -> None:
        x = torch.randn(2, 4)
        out = layer(x)
        x.zero_()
        with pytest.raises(everygpu.EveryGPUError, match="written in place"):
            out.neg() if asks else products.take([out])

    def test_what_is_kept(self, layer: nn.Linear, products: DeferredLinears) -> None:
        out = layer(torch.randn(2, 4))
        with pytest.raises(everygpu.EveryGPUError, match="beyond its forward"):
            products.check()
        del out
        products.check()

    def test_layers_are_as_before(self, layer: nn.Linear) -> None:
        with contextlib.suppress(KeyError), DeferredLinears().watched([layer]):
            assert "forward" in vars(layer)
            raise KeyError
        assert "forward" not in vars(layer)
        assert type(linear(torch.randn(2, 4), layer.weight)) is Tensor


class TestSplitOff:
    """Compiled models, whose last product is left to be run after them."""

    @pytest.fixture
    def seen(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Collect what is computed apart."""
        calls: list[int] = []
        monkeypatch.setattr(deferred_linear, "is_large", lambda *_: True)
        monkeypatch.setattr(deferred_linear, "linear", lambda *args: calls.append(len(args)) or F.linear(*args))
        return calls

    def compare(self, net: nn.Module, x: Tensor) -> None:
        from everygpu.parallel.cuda_graphs.deferred_linear import split_off

        def backend(graph: Any, example_inputs: list[Any]) -> Any:
            put_behind = split_off(graph)
            return graph if put_behind is None else put_behind(graph)

        torch._dynamo.reset()
        compiled, twin = torch.compile(net, backend=backend), copy.deepcopy(net)
        for _ in range(2):
            loss_of(compiled(x), x).backward()
            loss_of(twin(x), x).backward()
        for p, expected in zip(net.parameters(), twin.parameters()):
            torch.testing.assert_close(p.grad, expected.grad)

    @pytest.mark.parametrize(("make", "num_operands"), [(Tied, 2), (Biased, 3), (Frozen, 3)])
    def test_a_product_at_the_end(self, make: Any, num_operands: int, seen: list[int]) -> None:
        self.compare(make(), torch.randint(VOCABULARY, (3, LENGTH)))
        assert seen == [num_operands] * 2

    @pytest.mark.parametrize("make", [Used, Cast, Counted])
    def test_others_stay(self, make: Any, seen: list[int]) -> None:
        self.compare(make(), torch.randint(VOCABULARY, (3, LENGTH)))
        assert not seen

    def test_a_model_that_is_one_product(self, seen: list[int]) -> None:
        layer = nn.Linear(VOCABULARY, VOCABULARY)
        torch._dynamo.reset()
        x = torch.randn(3, VOCABULARY)
        compiled = torch.compile(layer, backend=lambda graph, _: deferred_linear.split_off(graph) or graph)
        torch.testing.assert_close(compiled(x), layer(x))
        assert not seen

    def test_small_ones_stay(self) -> None:
        self.compare(Tied(), torch.randint(VOCABULARY, (3, LENGTH)))
