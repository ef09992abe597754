"""A training step on several ranks is that of one device on the whole batch."""

import contextlib
import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.errors import CallError, OptimizerError
from everygpu.parallel.replicas.remap import in_place_of
from everygpu.ranks.group import init_group
from everygpu.step.flat_parameters import FlatParameters
from everygpu.step.sharded_update import FIRST_ASKED, RankSums
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")

STEPS = [[5, 3], [1, 2], [4, 0], [2, 2], [0, 3], [3, 1]]
"""Rows of each rank's batch in each step."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.rare = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 8)
        self.unused = nn.Linear(3, 3)
        self.is_first_rank = False

    def forward(self, x):
        x = self.first(x).tanh()
        return self.last(self.rare(x) if self.is_first_rank else x)


def make():
    torch.manual_seed(0)
    return Net()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    num_rows = sum(STEPS[step])
    y = torch.randint(0, 5, (num_rows,), generator=generator)
    y[: num_rows // 3] = -100
    return torch.randn(num_rows, 6, generator=generator), y


def rows_of(rank, step):
    begin = sum(STEPS[step][:rank])
    return slice(begin, begin + STEPS[step][rank])


def num_tokens(x, y):
    return (y >= 0).sum()


def reference(accumulate, clip_norm):
    """One device, whose loss is the mean over all counted targets of an update."""
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses = []
    for first in range(0, len(STEPS), accumulate):
        parts = [batch(step) for step in range(first, first + accumulate)]
        total = sum(num_tokens(*part) for part in parts)
        optimizer.zero_grad()
        for step, (x, y) in zip(range(first, first + accumulate), parts):
            outputs = []
            for rank in range(2):
                net.is_first_rank = rank == 0
                outputs.append(net(x[rows_of(rank, step)]))
            outputs = torch.cat(outputs)
            loss = F.cross_entropy(outputs, y, reduction="sum")
            (loss / total).backward()
            losses.append((loss / num_tokens(x, y)).item())
        if clip_norm:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
    return losses, net.state_dict()


class OwnAdamW(torch.optim.AdamW):
    """Steps on the first device, as what a subclass does is unknown."""


class OwnScatter(everygpu.DataParallel):
    def scatter(self, inputs, kwargs, device_ids):
        return super().scatter(inputs, kwargs, device_ids)


def train(num_devices, options, optimizer=torch.optim.AdamW, wrapper=everygpu.DataParallel):
    group = init_group()
    net = make()
    net.is_first_rank = group.rank == 0
    devices = ["cpu"] * (num_devices if isinstance(num_devices, int) else num_devices[group.rank])
    model, optimizer = wrapper(net, devices), optimizer(net.parameters(), lr=0.05)
    step = everygpu.TrainStep(model, F.cross_entropy, optimizer, weight=num_tokens, **options)
    losses = []
    for i in range(len(STEPS)):
        x, y = batch(i)
        mine = rows_of(group.rank, i)
        losses.append(step(x[mine], y[mine]).item())
    return losses, copy.deepcopy(net.state_dict()), step.stats().num_skipped


CASES = {
    "one device each": (1, {}),
    "two devices each, clipped": (2, {"clip_norm": 0.2}),
    "two devices beside one": ((2, 1), {"clip_norm": 0.2}),
    "accumulated": (1, {"accumulate": 3, "clip_norm": 0.5}),
    "an optimizer of one's own": (1, {}, OwnAdamW),
    "a scatter of one's own": (2, {"accumulate": 3, "clip_norm": 0.5}, torch.optim.AdamW, OwnScatter),
}


def train_each():
    return {name: train(*case) for name, case in CASES.items()} | {
        "unequal": unequal(),
        "overflow": overflow(),
        "nonfinite": nonfinite(),
        "sparse": sparse(),
        "beside": [beside_backward(is_spread) for is_spread in (False, True)],
        "twice": gradient_after_its_bucket(),
        "refused": {refusing: without_graphs(refusing) for refusing in ((), (0,), (0, 1))},
    }


def test_training_equals_one_device_and_an_overflow_on_one_rank_is_skipped_on_all(tmp_path):
    ranks = run_ranks(train_each, size=2, folder=tmp_path)
    for name, (_, options, *_) in CASES.items():
        losses, values = reference(options.get("accumulate", 1), options.get("clip_norm"))
        for found, state, _ in (rank[name] for rank in ranks):
            assert found == pytest.approx(losses, rel=1e-4), name
            for key, value in values.items():
                torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
        assert all(torch.equal(a, b) for a, b in zip(ranks[0][name][1].values(), ranks[1][name][1].values())), name
    assert all("as many devices for a ShardedOptimizer, got [2, 1]" in rank["unequal"] for rank in ranks)
    assert [rank["overflow"] for rank in ranks] == [(1, True)] * 2
    skipped, message = ranks[0]["nonfinite"]
    assert skipped == ranks[1]["nonfinite"][0] == (1, True)
    assert "got others in update 2. The update is left out" in message
    assert [rank["sparse"] for rank in ranks] == [[2.0, 1.0, 1.0, 2.0]] * 2
    assert [rank["beside"] for rank in ranks] == [[[True] * 4] * 2] * 2
    assert all("use_reentrant=False" in rank["twice"] for rank in ranks)
    # Steps are those of a plain loop, on all ranks, once no rank captures them.
    assert [rank["refused"] for rank in ranks] == [{(): False, (0,): False, (0, 1): True}] * 2


def unequal():
    net = nn.Linear(2, 1)
    model = everygpu.DataParallel(net, ["cpu"] * (2 - init_group().rank))
    spread = everygpu.ShardedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model.device_ids)
    with pytest.raises(OptimizerError) as raised:
        everygpu.TrainStep(model, F.mse_loss, spread)
    return str(raised.value)


def small_loss(output, y):
    return 1e-3 * F.mse_loss(output, y)


def overflow():
    group = init_group()
    net = nn.Linear(2, 1)
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, ["cpu"]), small_loss, torch.optim.SGD(net.parameters(), lr=0.1), precision="fp16"
    )
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    step(x, y)
    before = copy.deepcopy(net.state_dict())
    step(x, y * float("inf") if group.rank else y)
    return step.stats().num_skipped, all(torch.equal(a, before[k]) for k, a in net.state_dict().items())


def nonfinite():
    group = init_group()
    net = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    step = everygpu.TrainStep(everygpu.DataParallel(net, ["cpu"]), F.mse_loss, optimizer)
    messages = []
    logger = logging.getLogger("everygpu.step.finite_check").parent
    handler = logging.StreamHandler(type("Messages", (), {"write": messages.append, "flush": int}))
    logger.addHandler(handler)
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    step(x, y)
    before = copy.deepcopy(net.state_dict())
    step(x * float("nan") if group.rank else x, y)
    logger.removeHandler(handler)
    skipped = step.stats().num_skipped, all(torch.equal(a, before[k]) for k, a in net.state_dict().items())
    return skipped, "".join(messages)


def sparse():
    """Rank 0 looks rows 1 and 2 of a table up, rank 1 row 1 twice; each step moves both by a half, on both ranks."""
    net = nn.Embedding(4, 1, sparse=True)
    nn.init.constant_(net.weight, 2.0)
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, ["cpu"]), signs, torch.optim.SparseAdam(net.parameters(), lr=0.5)
    )
    for _ in range(2):
        step(torch.tensor([1, 1] if init_group().rank else [1, 2]))
    return [round(x, 3) for x in net.weight.flatten().tolist()]


def beside_backward(is_spread):
    """Tell of each bucket whether its sum began before the first layer's gradient was there."""
    group, began = init_group(), []
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model = everygpu.DataParallel(net, ["cpu"], bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = everygpu.ShardedOptimizer(optimizer, model.device_ids) if is_spread else optimizer
    step = everygpu.TrainStep(model, F.mse_loss, optimizer)
    all_reduce = group.all_reduce

    def watched(x, **options):
        grad = net[0].weight.grad
        began.append(grad is None or not grad.any())
        return all_reduce(x, **options)

    group.all_reduce = watched
    try:
        step(torch.randn(3, 2), torch.randn(3, 1))
    finally:
        del group.all_reduce
    return began[:4]  # of the other layers


def without_graphs(refusing):
    """Train where these ranks find that they can't capture steps; tell whether gradients are the parameters' own."""
    group = init_group()
    net = make()
    bare = copy.deepcopy(net)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("everygpu.step.train_step.can_capture", lambda *_: True)
        patch.setattr("everygpu.step.train_step.make_capture", lambda *_, **__: None)
        optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in (net, bare)]
        step = everygpu.TrainStep(everygpu.DataParallel(net, ["cpu"]), F.cross_entropy, optimizers[0])
    generator = torch.Generator().manual_seed(2)
    for i in range(2 * FIRST_ASKED + 2):
        if i == 2 + 8 * group.rank and group.rank in refusing:  # not in the same step
            step._strategy.give_up_captures()
        x, y = torch.randn(6, 6, generator=generator), torch.randint(0, 5, (6,), generator=generator)
        mine = slice(3 * group.rank, 3 * group.rank + 3)
        step(x[mine], y[mine])
        optimizers[1].zero_grad()
        F.cross_entropy(bare(x), y).backward()
        optimizers[1].step()
    for name, value in bare.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)
    return net.last.weight.grad is not None


class Reentrant(nn.Module):
    """Uses a layer within a reentrant checkpoint, and after it: its gradient comes in two parts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(checkpoint(self.layer, x, use_reentrant=True))


def gradient_after_its_bucket():
    net = Reentrant()
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, ["cpu"], bucket_cap_mb=1e-6), signs, torch.optim.SGD(net.parameters(), lr=0.1)
    )
    with pytest.raises(CallError) as caught:
        step(torch.randn(3, 2, requires_grad=True))
    return str(caught.value)


def signs(output):
    return output.mean()


def test_accumulated_batches_count_by_what_is_counted():
    """Without ranks, too: a mean of means weighs a batch of few targets like one of many."""
    nets = [nn.Linear(6, 5)]
    nets.append(copy.deepcopy(nets[0]))
    x, y = torch.randn(8, 6), torch.tensor([0, 1, 2, 3, -100, -100, -100, 4])
    step = everygpu.TrainStep(
        everygpu.DataParallel(nets[0], ["cpu"]),
        F.cross_entropy,
        torch.optim.SGD(nets[0].parameters(), lr=1.0),
        accumulate=2,
        weight=num_tokens,
    )
    step(x[:4], y[:4])
    step(x[4:], y[4:])
    optimizer = torch.optim.SGD(nets[1].parameters(), lr=1.0)
    F.cross_entropy(nets[1](x), y).backward()
    optimizer.step()
    torch.testing.assert_close(nets[0].weight, nets[1].weight)


class TestSumsOfRanks:
    @pytest.mark.parametrize("in_own_leaves", [False, True], ids=["eager", "captured"])
    def test_begin_while_backward_goes_on(self, in_own_leaves):
        """A capture goes backward to leaves of its own, whose gradients count as the parameters'."""
        log = []

        class Ranks:
            def all_reduce(self, flat):
                log.append("sum")
                return lambda: None

        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        flat_params = FlatParameters(list(net.parameters()), [torch.device("cpu")], bucket_bytes=64)
        sums = RankSums(Ranks(), flat_params)
        x = torch.randn(3, 4, requires_grad=True)
        x.register_hook(lambda _: log.append("inputs"))
        with contextlib.ExitStack() as stack:
            if in_own_leaves:
                (leaves,) = stack.enter_context(flat_params.in_new_leaves())
                stack.enter_context(in_place_of(net, leaves))
            flat_params.attach_grads()
            loss = net(x).sum()
            with sums.adding_up(loss):
                loss.backward()
        assert log.count("sum") == len([plan for plan in flat_params.plans if plan.numel]) > 1
        assert log.index("inputs") > 0
