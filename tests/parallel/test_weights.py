"""How much the result of each replica counts: by its rows, ``labels`` that count, or what ``weight=`` says."""

import linecache
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import everygpu
from everygpu.errors import OptionError


class Tagger(nn.Module):
    """Returns its loss, as models of ``transformers`` do: the mean over the targets that aren't -100."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 5)

    def forward(self, x, labels=None, y=None):
        targets = labels if y is None else y
        return {"loss": F.cross_entropy(self.linear(x).flatten(0, 1), targets.flatten())}


@pytest.fixture
def batch():
    x, y = torch.randn(6, 4, 3), torch.randint(0, 5, (6, 4))
    y[0], y[1, 1:], y[4] = -100, -100, -100  # of two replicas three rows, of three two rows with 1, 8, 4 targets
    return x, y


def tensor(x, y):
    return (y != -100).sum()


def number(x, y):
    return int(tensor(x, y))


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("weight", [None, tensor, number])
def test_the_mean_of_losses_is_that_of_the_whole_batch(batch, num, weight):
    x, y = batch
    bare, net = Tagger(), Tagger()
    model = everygpu.DataParallel(net, ["cpu"] * num, weight=weight)
    x = x.double()
    bare.double(), net.double()
    expected = bare(x, y=y)["loss"]
    expected.backward()
    found = (model(x, labels=y) if weight is None else model(x, y=y))["loss"].mean()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(net.linear.weight.grad, bare.linear.weight.grad)


def test_a_share_without_targets_counts_nothing(batch):
    x, y = batch
    y[3:] = -100
    model = everygpu.DataParallel(Tagger(), ["cpu"] * 2)
    loss = model(x, labels=y)["loss"]
    assert loss[1].isnan()
    torch.testing.assert_close(loss.mean(), model.module(x, labels=y)["loss"])
    assert list(loss.shard_rows) == [tensor(x, y), 0]


class Language(nn.Module):
    """Embeds tokens and says which come next."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

    def logits(self, ids):
        return self.head(self.embed(ids))


class Shifting(Language):
    def forward(self, ids, labels):
        logits = self.logits(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ByVariables(Language):
    def forward(self, ids, labels):
        shift_logits, shift_labels = self.logits(ids)[..., :-1, :], labels[..., 1:].contiguous()
        return nn.CrossEntropyLoss()(shift_logits.flatten(0, 1), shift_labels.flatten())


class UnshiftedForCausalLM(Language):
    """As ``BartForCausalLM``: labels are shifted before they come."""

    def forward(self, ids, labels):
        return F.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten())


class Inheriting(Shifting):
    pass


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Shifting()

    def forward(self, ids, labels):
        return 2 * self.inner(ids, labels)


def loss_for_causal_lm(logits, labels=None, shift_labels=None):
    if shift_labels is not None:
        return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_for_masked_lm(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


loss_for_causal_lm.__name__, loss_for_masked_lm.__name__ = "ForCausalLMLoss", "ForMaskedLMLoss"


class ByFunction(Language):
    """As most models of ``transformers``."""

    loss_function = staticmethod(loss_for_causal_lm)

    def forward(self, ids, labels):
        return self.loss_function(self.logits(ids), labels)


class ByAnotherFunction(ByFunction):
    loss_function = staticmethod(loss_for_masked_lm)


class ByModule(Language):
    def __init__(self):
        super().__init__()
        self.loss_function = nn.CrossEntropyLoss()

    def forward(self, ids, labels):
        return self.loss_function(self.logits(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ByFunctionOfShifted(ByFunction):
    """As where a decoder's inputs are the labels, shifted."""

    def forward(self, ids, labels):
        return self.loss_function(self.logits(ids), labels=None, shift_labels=labels)


class IgnoringAnother(Language):
    def forward(self, ids, labels):
        return F.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten(), ignore_index=0)


class IgnoringByAttribute(Language):
    """As models of segmentation."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(ignored=3)

    def forward(self, ids, labels):
        loss = nn.CrossEntropyLoss(ignore_index=self.config.ignored)
        return loss(self.logits(ids).flatten(0, 1), labels.flatten())


class OfSequences(Language):
    """A mean over rows, whatever their lengths."""

    def forward(self, ids, labels):
        scores = self.logits(ids.repeat(1, 3)).log_softmax(-1).transpose(0, 1)
        lengths, times = (labels > 0).sum(1), torch.full((len(ids),), 3 * ids.shape[1])
        return F.ctc_loss(scores, torch.where(labels > 0, labels, 0).sort(1, True)[0], times, lengths)


TYPED = """class {}(Language):
    def forward(self, ids, labels):
        return F.cross_entropy(self.logits(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
"""


def typed(name, is_in_a_notebook):
    """Make a class of which no file has the source; of a notebook's cells, Python knows the lines."""
    code, cell, scope = TYPED.format(name), f"<cell of {name}>", {"Language": Language, "F": F}
    if is_in_a_notebook:
        linecache.cache[cell] = (len(code), None, code.splitlines(keepends=True), cell)
    exec(compile(code, cell, "exec"), scope)
    return scope[name]


@pytest.mark.parametrize(
    "kind",
    [
        *(Shifting, ByVariables, UnshiftedForCausalLM, Inheriting, Wrapping, ByFunction, ByAnotherFunction),
        *(ByModule, ByFunctionOfShifted, IgnoringAnother, IgnoringByAttribute, OfSequences),
        *(typed("TypedForCausalLM", is_in_a_notebook=False), typed("InACell", is_in_a_notebook=True)),
    ],
)
def test_which_labels_count_is_known_from_the_models_code(batch, kind):
    _, y = batch
    y[1:3] = torch.tensor([3, -100, 2, 1])
    y[:2, 2] = 3
    model = everygpu.DataParallel(kind().double(), ["cpu"] * 2)
    ids = y.clamp(min=0)
    y = y.clamp(min=0) if kind.__name__.startswith("Ignoring") else y
    torch.testing.assert_close(model(ids, labels=y).mean(), model.module(ids, labels=y), rtol=1e-13, atol=0)


def test_a_caller_who_normalizes_is_left_alone():
    class Summed(nn.Module):
        def forward(self, x, labels, num_items):
            return x.sum() / num_items

    x, labels = torch.arange(5.0), torch.tensor([-100, -100, 1, 1, 1])
    model = everygpu.DataParallel(Summed(), ["cpu"] * 2)
    found = model(x, labels=labels, num_items=torch.tensor([3, 3]))
    torch.testing.assert_close(found.mean() * 2, x.sum() / 3)


@pytest.mark.parametrize("engine", ["threads", "graphs"])
def test_a_step_weighs_the_models_losses(batch, engine, in_threads):
    x, y = batch
    bare, net = Tagger(), Tagger()
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, ["cpu"] * 2, engine=engine), None, torch.optim.SGD(net.parameters(), 0.1)
    )
    optimizer = torch.optim.SGD(bare.parameters(), 0.1)
    for _ in range(3):
        loss = bare(x, labels=y)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step({"x": x, "labels": y}), loss.detach())
    torch.testing.assert_close(net.linear.weight, bare.linear.weight)


CLASSES = torch.tensor([1.0, 2.0, 3.0, 0.5, 0.1])


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=CLASSES),
        nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1),
        F.cross_entropy,
    ],
    ids=["ignored", "class weights", "another index", "function"],
)
def test_accumulated_batches_make_one(batch, num, loss):
    x, y = (t.flatten(0, 1) for t in batch)
    y = torch.where(y == -100, 2, y) if getattr(loss, "ignore_index", -100) == 2 else y

    def trained(accumulate):
        torch.manual_seed(1)
        net = nn.Linear(3, 5)
        model = everygpu.DataParallel(net, ["cpu"] * num)
        step = everygpu.TrainStep(model, loss, torch.optim.SGD(net.parameters(), 1.0), accumulate=accumulate)
        for part in zip(x.chunk(accumulate), y.chunk(accumulate)):
            step(*part)
        return net.weight.detach()

    whole = trained(1)
    for accumulate in (2, 3, 4):
        torch.testing.assert_close(trained(accumulate), whole)


def test_a_weight_of_other_arguments_is_refused():
    model = everygpu.DataParallel(nn.Linear(2, 1), ["cpu"] * 2, weight=lambda x, y: len(y))
    with pytest.raises(OptionError, match=r"weight must take each input .*here weight\(Tensor\)"):
        model(torch.ones(4, 2))
