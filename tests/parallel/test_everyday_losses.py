"""Losses that people write, as a model returns them: their mean is one device's, or counts by rows and says so."""

import logging
import random
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import everygpu

PAD, CLASSES = 0, 5
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.5, 0.1], dtype=torch.float64)


class Model(nn.Module):
    """Scores of shape (rows, time, classes), and the loss of them."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES)
        self.loss, self.config = loss, SimpleNamespace(pad=PAD, inner=SimpleNamespace(ignored=PAD))
        self.criterion = nn.CrossEntropyLoss(ignore_index=PAD)
        self.register_buffer("class_weights", WEIGHTS)

    def forward(self, ids, labels):
        return self.loss(self, self.head(self.embed(ids)), labels)


def batch_of(num_rows=7):
    """Rows of several lengths: labels are -100 where nothing is, unevenly over any shares."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(1, CLASSES, (num_rows, 6), generator=generator) for _ in range(2))
    for row, length in enumerate([1, 6, 2, 5, 6, 6, 3] * num_rows):
        if row < num_rows:
            labels[row, length:] = -100
            ids[row, length:] = PAD
    return ids, labels


def flat(z, y):
    return z.flatten(0, 1), y.flatten()


def padded(y):
    return torch.where(y == -100, PAD, y)


def mask_of(y):
    return (y != -100).double()


def shifted(z, y):
    return z[:, :-1].flatten(0, 1), y[:, 1:].flatten()


def shift_in_a_helper(z, y):
    return F.cross_entropy(*shifted(z, y))


def per_row(z, y):
    losses = F.cross_entropy(z.transpose(1, 2), y, reduction="none")
    return losses.sum(1) / mask_of(y).sum(1)


def one_hot(y):
    return F.one_hot(y.clamp(min=0), CLASSES).double()


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


def chunked(z, y):
    parts = zip(z.chunk(2), y.chunk(2))
    return sum(F.cross_entropy(*flat(*part), reduction="sum") for part in parts) / (y != -100).sum()


def focal(z, y, reduction="mean"):
    losses = F.cross_entropy(*flat(z, y), reduction="none")
    focused = (1 - torch.exp(-losses)) ** 2 * losses
    return focused.mean() if reduction == "mean" else focused.sum() / mask_of(y).sum()


def dice(z, y):
    p, t = z.softmax(-1), one_hot(y)
    return 1 - 2 * (p * t).sum() / (p + t).sum()


def ctc(z, y, reduction="mean"):
    lengths = mask_of(y).sum(1).long().clamp(max=2)
    scores, times = z.log_softmax(-1).transpose(0, 1), torch.full((len(z),), z.shape[1])
    targets = torch.arange(1, 3).expand(len(y), 2)
    return F.ctc_loss(scores, targets, times, lengths, reduction=reduction)


def written(z, y):
    loss = F.cross_entropy(*flat(z, y))
    loss *= 0.5
    return loss


class Wrapped(nn.Module):
    def forward(self, z, y):
        return {"out": {"loss": F.cross_entropy(*flat(z, y))}}


class Smoothed(nn.Module):
    """As timm's."""

    def forward(self, z, y):
        logprobs = z.log_softmax(-1)
        nll = -logprobs.gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)
        return (0.9 * nll + 0.1 * -logprobs.mean(-1)).mean()


OBJECT, WRAPPED, SMOOTHED = nn.CrossEntropyLoss(), Wrapped(), Smoothed()

SEEN = {
    # torch's own losses, whatever ignores labels: the denominator that was computed.
    "function": lambda m, z, y: F.cross_entropy(*flat(z, y)),
    "object": lambda m, z, y: OBJECT(*flat(z, y)),
    "object made in forward": lambda m, z, y: nn.CrossEntropyLoss()(*flat(z, y)),
    "ignore_index in __init__": lambda m, z, y: m.criterion(*flat(z, padded(y))),
    "ignore_index a constant": lambda m, z, y: F.cross_entropy(*flat(z, padded(y)), ignore_index=PAD),
    "ignore_index of a config": lambda m, z, y: F.cross_entropy(*flat(z, padded(y)), ignore_index=m.config.pad),
    "ignore_index two attributes deep": lambda m, z, y: nn.CrossEntropyLoss(ignore_index=m.config.inner.ignored)(
        *flat(z, padded(y))
    ),
    "ignore_index computed": lambda m, z, y: F.cross_entropy(*flat(z, y), ignore_index=int("-100")),
    "shifted": lambda m, z, y: F.cross_entropy(*shifted(z, y)),
    "shifted in a helper": lambda m, z, y: shift_in_a_helper(z, y),
    "shifted by padding": lambda m, z, y: F.cross_entropy(
        z.flatten(0, 1), F.pad(y, (0, 1), value=-100)[:, 1:].flatten()
    ),
    "shifted by two": lambda m, z, y: F.cross_entropy(z[:, :-2].flatten(0, 1), y[:, 2:].flatten()),
    "shifted by roll": lambda m, z, y: F.cross_entropy(*flat(z, y.roll(-1, 1))),
    "3-D": lambda m, z, y: F.cross_entropy(z.transpose(1, 2), y),
    "4-D": lambda m, z, y: F.cross_entropy(z.transpose(1, 2)[..., None], y[..., None]),
    "5-D": lambda m, z, y: F.cross_entropy(z.transpose(1, 2)[..., None, None], y[..., None, None]),
    "nll_loss": lambda m, z, y: F.nll_loss(z.flatten(0, 1).log_softmax(-1), y.flatten()),
    "NLLLoss 2-D": lambda m, z, y: nn.NLLLoss()(z.log_softmax(-1).transpose(1, 2), y),
    "class weights": lambda m, z, y: F.cross_entropy(*flat(z, y), weight=m.class_weights),
    "class weights and PAD": lambda m, z, y: F.cross_entropy(*flat(z, padded(y)), m.class_weights, ignore_index=PAD),
    "masked rows picked": lambda m, z, y: F.cross_entropy(z[y != -100], y[y != -100]),
    "masked_fill": lambda m, z, y: F.cross_entropy(*flat(z, y.masked_fill(y == 2, -100))),
    "last token only": lambda m, z, y: F.cross_entropy(z[:, -1], y[:, -1]),
    "a class per row": lambda m, z, y: F.cross_entropy(z.mean(1), y[:, 0]),
    "unsqueezed": lambda m, z, y: F.cross_entropy(*flat(z, y)).unsqueeze(0),
    "viewed": lambda m, z, y: F.cross_entropy(*flat(z, y)).view(1),
    "reshaped": lambda m, z, y: F.cross_entropy(*flat(z, y)).reshape(1, 1),
    "indexed by None": lambda m, z, y: F.cross_entropy(*flat(z, y))[None],
    "cloned": lambda m, z, y: F.cross_entropy(*flat(z, y)).clone(),
    "converted": lambda m, z, y: F.cross_entropy(*flat(z, y)).float().double(),
    "of float32 scores": lambda m, z, y: F.cross_entropy(z.float().flatten(0, 1), y.flatten()),
    "of bfloat16 scores": lambda m, z, y: F.cross_entropy(z.bfloat16().flatten(0, 1), y.flatten()).double(),
    "in a tuple": lambda m, z, y: (F.cross_entropy(*flat(z, y)), z),
    "in a dict": lambda m, z, y: {"loss": F.cross_entropy(*flat(z, y)), "logits": z},
    "in a dataclass": lambda m, z, y: Output(F.cross_entropy(*flat(z, y)), z),
    "of a module within": lambda m, z, y: WRAPPED(z, y)["out"],
    "two losses": lambda m, z, y: {"loss": F.cross_entropy(*flat(z, y)), "other": F.cross_entropy(*shifted(z, y))},
    # Means over rows, or over as many elements of each row.
    "mean of squares": lambda m, z, y: F.mse_loss(z, one_hot(y)),
    "mean of absolute values": lambda m, z, y: nn.L1Loss()(z, one_hot(y)),
    "smooth l1": lambda m, z, y: F.smooth_l1_loss(z, one_hot(y)),
    "huber": lambda m, z, y: F.huber_loss(z, one_hot(y)),
    "binary cross entropy": lambda m, z, y: F.binary_cross_entropy_with_logits(z, one_hot(y)),
    "probabilities": lambda m, z, y: F.cross_entropy(*flat(z, y)[:1], one_hot(y).flatten(0, 1)),
    "kl_div batchmean": lambda m, z, y: F.kl_div(
        z.mean(1).log_softmax(-1), torch.full_like(z[:, 0], 1 / CLASSES), reduction="batchmean"
    ),
    "cosine": lambda m, z, y: (1 - F.cosine_similarity(z, one_hot(y), dim=-1)).mean(),
    "cosine embedding": lambda m, z, y: F.cosine_embedding_loss(z[:, 0], z[:, 1], torch.ones(len(z))),
    "triplet": lambda m, z, y: F.triplet_margin_loss(z[:, 0], z[:, 1], z[:, 2]),
    "gaussian": lambda m, z, y: F.gaussian_nll_loss(z, one_hot(y), torch.ones_like(z)),
    "poisson": lambda m, z, y: F.poisson_nll_loss(z, one_hot(y)),
    "multilabel": lambda m, z, y: F.multilabel_soft_margin_loss(z[:, 0], one_hot(y)[:, 0]),
    "multi margin": lambda m, z, y: F.multi_margin_loss(z[:, 0], y[:, 0]),
    "ctc": lambda m, z, y: ctc(z, y),
    "mean of each row, of all rows": lambda m, z, y: per_row(z, y).mean(),
    "sum by the rows": lambda m, z, y: F.cross_entropy(*flat(z, y), reduction="sum") / len(z),
    "sum by all elements": lambda m, z, y: F.cross_entropy(*flat(z, y), reduction="sum") / y.numel(),
    "none, then mean": lambda m, z, y: F.cross_entropy(*flat(z, y), reduction="none").mean(),
    "focal": lambda m, z, y: focal(z, y),
    "smoothed as timm's": lambda m, z, y: SMOOTHED(z, y),
    "two means over rows": lambda m, z, y: F.mse_loss(z, one_hot(y)) + 0.1 * z.square().mean(),
    "commented": lambda m, z, y: z.square().mean(),  # F.cross_entropy(z, y), ignore_index=-100
}
"""Kinds that equal one device."""

ROWS = {
    "label smoothing": lambda m, z, y: F.cross_entropy(*flat(z, y), label_smoothing=0.1),
    "label smoothing with PAD": lambda m, z, y: F.cross_entropy(
        *flat(z, padded(y)), ignore_index=PAD, label_smoothing=0.1
    ),
    "scaled": lambda m, z, y: 2 * F.cross_entropy(*flat(z, y)),
    "scaled with PAD": lambda m, z, y: m.criterion(*flat(z, padded(y))) / 2,
    "scaled in place": lambda m, z, y: written(z, y),
    "two tasks": lambda m, z, y: F.cross_entropy(*flat(z, y)) + F.mse_loss(z, one_hot(y)),
    "with a penalty": lambda m, z, y: F.cross_entropy(*flat(z, y)) + 0.1 * m.head.weight.square().sum(),
    "shifted and not": lambda m, z, y: (F.cross_entropy(*flat(z, y)) + F.cross_entropy(*shifted(z, y))) / 2,
    "sum by the labels": lambda m, z, y: F.cross_entropy(*flat(z, y), reduction="sum") / (y != -100).sum(),
    "in chunks": lambda m, z, y: chunked(z, y),
    "none, then a masked mean": lambda m, z, y: (
        F.cross_entropy(*flat(z, y.clamp(min=0)), reduction="none") * mask_of(y).flatten()
    ).sum() / mask_of(y).sum(),
    "masked mean of squares": lambda m, z, y: ((z - 1).square().mean(-1) * mask_of(y)).sum() / mask_of(y).sum(),
    "picked mean of squares": lambda m, z, y: (z - 1)[y != -100].square().mean(),
    "masked binary cross entropy": lambda m, z, y: F.binary_cross_entropy_with_logits(
        z[y != -100], one_hot(y)[y != -100]
    ),
    "focal over labels": lambda m, z, y: focal(z, y, "labels"),
    "log_softmax by hand": lambda m, z, y: -(
        z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * mask_of(y)
    ).sum() / mask_of(y).sum(),
    "dice": lambda m, z, y: dice(z, y),
    "perplexity": lambda m, z, y: F.cross_entropy(*flat(z, y)).exp(),
    "per-class mean": lambda m, z, y: torch.stack(
        [F.cross_entropy(z[y == c], y[y == c], reduction="sum") for c in range(1, CLASSES)]
    ).sum() / (y != -100).sum(),
}  # fmt: skip
"""Kinds that count by rows, with a warning."""

SUMS = {
    "sum": lambda m, z, y: F.cross_entropy(*flat(z, y), reduction="sum"),
    "sum of squares": lambda m, z, y: ((z - 1).square().sum(-1) * mask_of(y)).sum(),
    "summed ctc": lambda m, z, y: ctc(z, y, "sum"),
    "mean times its labels": lambda m, z, y: F.cross_entropy(*flat(z, y)) * (y != -100).sum(),
}


def by_rows(loss, num, batch):
    """Return the mean of the shares' losses, by their rows."""
    bare, shares = Model(loss).double(), list(zip(*(x.chunk(num) for x in batch)))
    return sum(len(share[0]) * mean(loss_in(bare(*share))).detach() for share in shares) / len(batch[0])


def loss_in(output):
    if isinstance(output, Tensor):
        return output
    return (
        output["loss"]
        if isinstance(output, dict)
        else getattr(output, "loss", output[0] if type(output) is tuple else None)
    )


def compare(loss, reduce, num, *, batch=None, caplog=None):
    """Return the value and the gradients of one device and of several, and whether these warned."""
    ids, labels = batch or batch_of()
    bare, net = Model(loss).double(), Model(loss).double()
    if caplog is not None:
        caplog.clear()
    found = reduce(loss_in(everygpu.DataParallel(net, ["cpu"] * num)(ids, labels)))
    expected = reduce(loss_in(bare(ids, labels)))
    results = []
    for value, module in ((found, net), (expected, bare)):
        value.backward()
        results.append((value.detach(), [p.grad for p in module.parameters()]))
    return (*results, bool(caplog is not None and "taken by rows" in caplog.text))


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "everygpu")
    return caplog


def mean(loss):
    return loss.mean()


CLOSE = {"rtol": 1e-6, "atol": 1e-12}


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("name", SEEN)
def test_the_mean_is_one_devices(name, num):
    close = {"rtol": 1e-2, "atol": 1e-2} if "16" in name else {"rtol": 1e-5, "atol": 1e-6} if "32" in name else CLOSE
    found, expected, _ = compare(SEEN[name], mean, num)
    torch.testing.assert_close(found, expected, **close)


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_not_known_counts_by_rows_and_says_so(name, num, said):
    found, _, has_warned = compare(ROWS[name], mean, num, caplog=said)
    assert has_warned
    torch.testing.assert_close(found[0], by_rows(ROWS[name], num, batch_of()), **CLOSE)


def test_tokens_that_a_model_picks_itself_are_found_behind_its_loss(said):
    ids, labels = batch_of()
    loss = lambda m, z, y: F.cross_entropy(z[y > 2], y[y > 2]) / 2  # noqa: E731
    everygpu.DataParallel(Model(loss).double(), ["cpu"] * 2)(ids, labels.clamp(min=0)).mean()
    assert "taken by rows" in said.text


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_stays_a_sum(name, num, said):
    found, expected, has_warned = compare(SUMS[name], Tensor.sum, num, caplog=said)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert not has_warned


def whole(m, z, y):
    return F.cross_entropy(*flat(z, y))


def test_without_gradients_nothing_is_seen_so_rows_count(said):
    ids, labels = batch_of()
    net = Model(whole).double()
    model = everygpu.DataParallel(net, ["cpu"] * 2)
    with torch.no_grad():
        found = model(ids, labels).mean()
        by_rows = (4 * net(ids[:4], labels[:4]) + 3 * net(ids[4:], labels[4:])) / 7
        torch.testing.assert_close(found, by_rows)
        assert said.text.count("weight=") == 2  # with an example
        model(ids, labels).mean()
        model(ids, labels).mean()
        assert len(said.records) == 1
        said.clear()
        model = everygpu.DataParallel(net, ["cpu"] * 2)
        torch.testing.assert_close(model(ids, labels.clamp(min=0)).mean(), net(ids, labels.clamp(min=0)))
        assert not said.records


@pytest.mark.parametrize("name", ["function", "unsqueezed", "in a dict"])
def test_a_loss_of_a_single_row_is_no_row(name):
    found, expected, _ = compare(SEEN[name], mean, 3, batch=batch_of(3))
    torch.testing.assert_close(found, expected, **CLOSE)


def test_what_was_ignored_in_training_is_looked_for_in_evaluation(said):
    ids, labels = batch_of()
    model = everygpu.DataParallel(Model(lambda m, z, y: m.criterion(*flat(z, y))).double(), ["cpu"] * 2)
    model(ids, padded(labels)).mean().backward()
    assert not said.records
    with torch.no_grad():
        model(ids, padded(labels)).mean()
    assert "taken by rows" in said.text


def loss_for_causal_lm(logits, labels):
    return F.cross_entropy(*shifted(logits.float(), labels))


class OfALibrary(Model):
    """As a model of ``transformers``."""

    @property
    def loss_function(self):
        return getattr(self, "_loss_function", loss_for_causal_lm)

    @loss_function.setter
    def loss_function(self, function):
        self._loss_function = function

    def forward(self, ids, labels):
        self.was_called = True
        return {"loss": self.loss(self.loss_function(logits=self.head(self.embed(ids)), labels=labels))}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_transformers_own_loss_functions_are_seen_without_gradients(monkeypatch, said, own, fails):
    library = SimpleNamespace(LOSS_MAPPING={"ForCausalLM": loss_for_causal_lm})
    monkeypatch.setitem(sys.modules, "transformers.loss.loss_utils", library)
    ids, labels = batch_of()
    net = OfALibrary(lambda x: x)
    if own:
        net.loss_function = loss_for_causal_lm
    attributes = {*vars(net), "was_called"}
    model = everygpu.DataParallel(net, ["cpu"] * 3)
    with torch.no_grad():
        if fails:
            net.loss = None
            with pytest.raises(TypeError):
                model(ids, labels)
            net.loss = lambda x: x
        found = model(ids, labels)["loss"]
        torch.testing.assert_close(found.mean(), net(ids, labels)["loss"], rtol=1e-6, atol=0)
        assert not found.requires_grad
        assert not said.records
        assert set(vars(net)) == attributes
        assert net.loss_function is loss_for_causal_lm
        for change in (lambda x: x.mul_(2), lambda x: x + 1):  # as where routers' losses are added
            said.clear()
            net.loss = change
            everygpu.DataParallel(net, ["cpu"] * 3)(ids, labels)["loss"].mean()
            assert "taken by rows" in said.text


def test_losses_of_different_means_that_are_added_say_so(said):
    def two(m, z, y):
        return {
            "loss": F.cross_entropy(*flat(z, y)),
            "other": F.cross_entropy(*shifted(z, y)),
            "rows": z.square().mean(),
        }

    ids, labels = batch_of()
    net = Model(two).double()
    expected = net(ids, labels)
    for num in (2, 3):
        model = everygpu.DataParallel(net, ["cpu"] * num)
        found = model(ids, labels)
        torch.testing.assert_close(sum(x.mean() for x in found.values()), sum(expected.values()), **CLOSE)
        (found["loss"] + found["loss"] * 2).mean().backward()
        (found["loss"] + found["rows"]).sum()
        assert "were added" not in said.text
        for other in ("other", "rows"):
            model = everygpu.DataParallel(net, ["cpu"] * num)
            found, said_before = model(ids, labels), len(said.records)
            total = found["loss"] + found[other]
            rows = torch.tensor([len(x) for x in ids.chunk(num)], dtype=torch.float64)
            torch.testing.assert_close(
                total.mean(), (everygpu.parallel.gather(total) * rows).sum() / rows.sum(), **CLOSE
            )
            assert "were added" in said.records[said_before].getMessage()
        said.clear()


def test_losses_of_the_same_labels_are_added_as_one_device_adds_them(said):
    def heads(m, z, y):
        return {"loss": F.cross_entropy(*flat(z, y)), "aux": F.cross_entropy(*flat(2 * z, y))}

    ids, labels = batch_of()
    net = Model(heads).double()
    found, expected = everygpu.DataParallel(net, ["cpu"] * 3)(ids, labels), net(ids, labels)
    torch.testing.assert_close((found["loss"] + 0.4 * found["aux"]).mean(), expected["loss"] + 0.4 * expected["aux"])
    assert not said.records


def test_a_checkpointed_loss_is_not_computed_again_to_look_at_it(said):
    calls = []

    def head(z, y):
        calls.append(1)
        return F.cross_entropy(*flat(z, y))

    def checkpointed(m, z, y):
        return torch.utils.checkpoint.checkpoint(head, z, y, use_reentrant=False)

    model = everygpu.DataParallel(Model(checkpointed).double(), ["cpu"] * 2)
    model(*batch_of()).mean()
    assert len(calls) == 2
    assert len(said.records) == 1


def test_labels_are_looked_at_in_ever_fewer_batches():
    """Reading what is found waits for the device."""

    ids, labels = batch_of(8)
    labels[:] = labels[0]
    model, looks = everygpu.DataParallel(Model(lambda m, z, y: 2 * whole(m, z, y)).double(), ["cpu"] * 2), []
    for _ in range(9):
        with torch.autograd.profiler.profile() as profile:
            model(ids, labels).mean().backward()
        looks.append(any(event.name == "aten::_local_scalar_dense" for event in profile.function_events))
    assert looks == [i in (1, 2, 4, 8) for i in range(1, 10)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["function", "unsqueezed", "class weights and PAD", "two losses", "in a tuple"])
def test_compiled_losses_are_seen_in_dynamos_graph(name, quick_guards):
    torch.compiler.reset()
    ids, labels = batch_of()
    bare, net = Model(SEEN[name]).double(), Model(SEEN[name]).double()
    compiled = torch.compile(net, backend="eager")
    model = everygpu.DataParallel(compiled, ["cpu"] * 2, engine="compile")
    found, expected = loss_in(model(ids, labels)).mean(), loss_in(bare(ids, labels)).mean()
    assert model.engine_in_use == "compile"
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.compiler.reset()


def test_a_compiled_loss_that_is_written_to_is_another(said, quick_guards):
    torch.compiler.reset()
    net = Model(lambda m, z, y: written(z, y)).double()
    model = everygpu.DataParallel(torch.compile(net, backend="eager"), ["cpu"] * 2, engine="compile")
    model(*batch_of()).mean()
    assert "taken by rows" in said.text
    torch.compiler.reset()


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("is_models", [True, False])
def test_accumulated_batches_count_by_what_their_losses_are_means_of(num, is_models, accumulate):
    ids, labels = batch_of(6)

    def loss_of(z, y):
        return F.cross_entropy(*flat(z, padded(y)), weight=WEIGHTS, ignore_index=PAD)

    class Scores(Model):
        def forward(self, ids):
            return self.head(self.embed(ids))

    def trained(parts):
        net = (Model(lambda m, z, y: loss_of(z, y)) if is_models else Scores(None)).double()
        model = everygpu.DataParallel(net, ["cpu"] * num)
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        step = everygpu.TrainStep(model, None if is_models else loss_of, optimizer, accumulate=parts)
        for _ in range(2):
            for part in zip(ids.chunk(parts), labels.chunk(parts)):
                step(*part)
        return list(net.parameters())

    torch.testing.assert_close(trained(accumulate), trained(1), **CLOSE)


def test_a_step_that_adds_batches_up_by_rows_says_so(said):
    net = nn.Linear(3, 5)
    loss = lambda z, y: 2 * F.cross_entropy(z, y)  # noqa: E731
    step = everygpu.TrainStep(net, loss, torch.optim.SGD(net.parameters(), 1.0), accumulate=2)
    for _ in range(4):
        step(torch.ones(4, 3), torch.tensor([0, 1, -100, -100]))
    assert [r.getMessage().split(":")[0] for r in said.records] == ["TrainStep"]


# Random losses.


def draw(source):
    """Draw a loss of scores and labels, and how a model returns it; and, where it is the exp of a mean, that mean."""
    ignored, smoothing = source.choice([-100, -100, PAD, 2]), source.choice([0.0, 0.0, 0.0, 0.1])
    weight, reduction = source.choice([None, None, WEIGHTS]), source.choice(["mean", "mean", "mean", "none", "sum"])
    shape, is_nll = source.choice(["flat", "3-D", "4-D", "shifted", "picked"]), source.random() < 0.3
    after = source.choice(["", "", "", "unsqueeze", "clone", "double", "times", "penalty", "labels", "rows", "exp"])
    container = source.choice(["tensor", "tuple", "dict", "dataclass"])

    def loss(m, z, y, after=after):
        y = padded(y) if ignored == PAD else y.masked_fill(y == -100, 2) if ignored == 2 else y
        if shape in ("3-D", "4-D"):
            a, b = z.transpose(1, 2), y
            a, b = (a[..., None], b[..., None]) if shape == "4-D" else (a, b)
        else:
            a, b = shifted(z, y) if shape == "shifted" else flat(z, y)
            a, b = (a[b != ignored], b[b != ignored]) if shape == "picked" else (a, b)
        if is_nll:
            found = F.nll_loss(a.log_softmax(1), b, weight, ignore_index=ignored, reduction=reduction)
        else:
            more = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing}
            found = F.cross_entropy(a, b, weight, **more)
        if reduction == "none":
            found = found.mean()
        elif reduction == "sum":
            found = found / len(z)
        found = {
            "": lambda: found, "unsqueeze": lambda: found.unsqueeze(0), "clone": found.clone, "double": found.double,
            "times": lambda: found * 0.3, "penalty": lambda: found + z.square().mean(), "exp": found.exp,
            "labels": lambda: found * (b != ignored).sum() / len(z), "rows": lambda: found / len(z) * len(z),
        }[after]()  # fmt: skip
        return {"tensor": found, "tuple": (found, z), "dict": {"loss": found}, "dataclass": Output(found, z)}[container]

    return loss, partial(loss, after="") if after == "exp" else None


def check_random(seed, caplog):
    source = random.Random(seed)
    (loss, inner), num_rows, num = draw(source), source.randint(4, 9), source.choice([2, 3])
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    batch = tuple(x[order] for x in batch_of(num_rows))
    found, expected, has_warned = compare(loss, mean, num, batch=batch, caplog=caplog)
    try:
        torch.testing.assert_close(found, expected, **CLOSE)
    except AssertionError:
        torch.testing.assert_close(found[0], by_rows(loss, num, batch), equal_nan=True, **CLOSE)
        # No weights make a mean of exponentials one device's: of those, rows are to be right for what is below.
        if not has_warned:
            assert inner is not None, seed
            whole = mean(loss_in(Model(inner).double()(*batch))).detach()
            torch.testing.assert_close(by_rows(inner, num, batch), whole, **CLOSE)
        return False
    return True


@pytest.mark.parametrize("first", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(60, 3000, 60))])
def test_random_losses_are_one_devices_or_say_that_they_are_not(first, said):
    assert sum(check_random(seed, said) for seed in range(first, first + 60)) > 20
