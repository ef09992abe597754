"""A sharded optimizer does what the stock one does, and shows its state as the stock one would."""

import copy
import gc
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import everygpu
from everygpu.errors import DeviceError, OptimizerError

Devices = Callable[[int], list[torch.device]]
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, t0=3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "Adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, betas=(0.8, 0.95)),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}


class Net(nn.Module):
    """Parameters of many kinds: a matrix, channels_last, 0-dim, empty, large, of double precision, frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(40, 60)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.fine = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(11))

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 40, generator=generator).to(self.scale.device)
        image = torch.randn(2, 3, 6, 6, generator=generator).to(self.scale.device)
        total = self.linear(x).square().mean() * self.scale + self.conv(image).square().mean()
        return total + self.fine.square().sum().float() + self.nothing.sum()


def groups(net: Net) -> list[dict[str, Any]]:
    late = [*net.conv.parameters(), net.scale]
    ids = {id(p) for p in late}
    return [{"params": [p for p in net.parameters() if id(p) not in ids]}, {"params": late, "lr": 0.02}]


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net.loss(step).backward()
        optimizer.step()


def assert_nets_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def assert_states_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for index, ours in a["state"].items():
        theirs = b["state"][index]
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if isinstance(value, Tensor):
                assert value.shape == theirs[name].shape, (index, name)
                assert value.dtype == theirs[name].dtype, (index, name)
                torch.testing.assert_close(value.cpu(), theirs[name].cpu(), rtol=1e-6, atol=1e-7)
            else:
                assert value == theirs[name]


def pair(used: list[torch.device], make: Any = torch.optim.Adam) -> tuple[Net, Any, Net, Any]:
    """Return two nets, each with a stock optimizer."""
    plain, ours = Net().to(used[0]), Net().to(used[0])
    return plain, make(groups(plain)), ours, make(groups(ours))


@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, 3) for name in OPTIMIZERS), *itertools.product(["AdamW", "SGD-nesterov", "RMSprop"], [1, 2])],
)
def test_equals_the_stock_optimizer(devices: Devices, name: str, count: int) -> None:
    used = devices(count)
    plain, stock, ours, mine = pair(used, OPTIMIZERS[name])
    sharded = everygpu.ShardedOptimizer(mine, used)
    train(plain, stock, range(6))
    train(ours, sharded, range(6))
    assert_nets_equal(ours, plain)
    assert_states_equal(sharded.state_dict(), stock.state_dict())
    assert ours.frozen.equal(plain.frozen)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_to_plain_torch_and_back(devices: Devices, name: str) -> None:
    used, make = devices(3), OPTIMIZERS[name]
    plain, stock, ours, mine = pair(used, make)
    sharded = everygpu.ShardedOptimizer(mine, used)
    train(plain, stock, range(8))

    train(ours, sharded, range(3))
    middle = make(groups(ours))
    middle.load_state_dict(sharded.state_dict())
    train(ours, middle, range(3, 5))
    again = everygpu.ShardedOptimizer(make(groups(ours)), used[:2])
    again.load_state_dict(middle.state_dict())
    train(ours, again, range(5, 8))

    assert_nets_equal(ours, plain)
    stock.load_state_dict(stock.state_dict())  # which casts numbers to the parameter's dtype
    assert_states_equal(again.state_dict(), stock.state_dict())


def test_the_stock_optimizer_shows_and_loads_the_state(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    stock = torch.optim.AdamW(groups(net))
    sharded = everygpu.ShardedOptimizer(stock, used)
    train(net, sharded, range(2))
    saved = stock.state_dict()
    assert len(saved["state"]) == 7
    assert not stock.state, "the state is on the devices"

    kept = copy.deepcopy(saved)
    train(net, sharded, range(2, 4))
    stock.load_state_dict(kept)
    assert_states_equal(sharded.state_dict(), kept)
    assert not stock.state


@pytest.mark.parametrize("num_others", [0, 2])
def test_a_state_that_is_there_already_is_taken_over(devices: Devices, num_others: int) -> None:
    """The stock optimizer's own, or that of another wrapper."""
    used = devices(3)
    plain, stock, ours, mine = pair(used)
    train(plain, stock, range(5))
    train(ours, everygpu.ShardedOptimizer(mine, used) if num_others else mine, range(2))
    train(ours, everygpu.ShardedOptimizer(mine, used[:2]), range(2, 5))
    assert_nets_equal(ours, plain)


def test_a_wrapper_that_was_replaced_refuses_to_step(devices: Devices) -> None:
    used = devices(3)
    net = Net().to(used[0])
    stock = torch.optim.Adam(groups(net))
    first = everygpu.ShardedOptimizer(stock, used)
    train(net, first, range(1))
    everygpu.ShardedOptimizer(stock, used[:2])
    with pytest.raises(OptimizerError, match="wrapped again"):
        train(net, first, range(1))


def test_the_stock_optimizer_may_step_by_itself_in_between(devices: Devices) -> None:
    used = devices(2)
    plain, stock, ours, mine = pair(used)
    train(plain, stock, range(6))
    sharded = everygpu.ShardedOptimizer(mine, used)
    for step in range(6):
        train(ours, mine if step % 3 == 1 else sharded, range(step, step + 1))
    assert_nets_equal(ours, plain)


@pytest.mark.parametrize("which", ["stock", "sharded"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_and_pickles_have_the_state(devices: Devices, which: str, way: str) -> None:
    used = devices(2)
    plain, stock, ours, mine = pair(used)
    sharded = everygpu.ShardedOptimizer(mine, used)
    train(plain, stock, range(5))
    train(ours, sharded, range(3))
    both = (ours, mine if which == "stock" else sharded)
    net, optimizer = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert not mine.state
    train(net, optimizer, range(3, 5))
    assert_nets_equal(net, plain)
    assert type(optimizer) is type(both[1])
    train(ours, sharded, range(3, 5))
    assert_nets_equal(ours, plain)


def test_parameters_that_share_memory_are_refused() -> None:
    whole = torch.randn(6, 4)
    first, last, over = (nn.Parameter(whole[a:b]) for a, b in ((0, 3), (3, 6), (2, 4)))
    for p in (first, last, over):
        p.grad = torch.ones_like(p)
    everygpu.ShardedOptimizer(torch.optim.SGD([first, last], lr=1.0), ["cpu"] * 2).step()
    with pytest.raises(OptimizerError, match=r"memory of their own, got parameter \d of shape \([23], 4\)"):
        everygpu.ShardedOptimizer(torch.optim.SGD([first, last, over], lr=1.0), ["cpu"] * 2).step()
    spread = nn.Parameter(torch.ones(1).expand(3))
    spread.grad = torch.ones(3)
    with pytest.raises(OptimizerError, match="memory of their own"):
        everygpu.ShardedOptimizer(torch.optim.SGD([spread], lr=1.0), ["cpu"]).step()


def test_release_gives_the_state_back(devices: Devices) -> None:
    used = devices(2)
    plain, stock, ours, mine = pair(used)
    train(plain, stock, range(4))
    sharded = everygpu.ShardedOptimizer(mine, used)
    train(ours, sharded, range(2))
    sharded.release()
    mine.load_state_dict(copy.deepcopy(mine.state_dict()))
    train(ours, mine, range(2, 4))
    assert_nets_equal(ours, plain)


def test_each_device_holds_its_share_of_the_state() -> None:
    weights = [nn.Parameter(torch.randn(1024, 64)) for _ in range(4)]
    sharded = everygpu.ShardedOptimizer(torch.optim.AdamW(weights), ["cpu"] * 4)
    for p in weights:
        p.grad = torch.ones_like(p)
    sharded.step()
    whole = 2 * sum(p.nbytes for p in weights)
    assert all(whole / 4 <= held <= whole / 4 + 100 for held in sharded.state_bytes())


@pytest.mark.parametrize("on", ["stock", "sharded"])
def test_schedulers_and_edits_take_effect_at_the_next_step(devices: Devices, on: str) -> None:
    used = devices(2)
    plain, stock, ours, mine = pair(used, lambda p: torch.optim.SGD(p, lr=0.1))
    sharded = everygpu.ShardedOptimizer(mine, used)
    pairs = [(plain, stock, stock), (ours, sharded, mine if on == "stock" else sharded)]
    for net, optimizer, watched in pairs:
        scheduler = lr_scheduler.StepLR(watched, 2, gamma=0.3)
        for step in range(6):
            train(net, optimizer, range(step, step + 1))
            scheduler.step()
        optimizer.param_groups[0]["weight_decay"] = 0.5
        train(net, optimizer, range(6, 7))
    assert_nets_equal(ours, plain)


def both(used: list[torch.device], make: Any) -> Iterator[tuple[Net, Any]]:
    """Yield two nets, with a stock optimizer and a sharded one; at the end they are to be equal."""
    nets = [Net().to(used[0]) for _ in range(2)]
    yield nets[0], make(nets[0])
    yield nets[1], everygpu.ShardedOptimizer(make(nets[1]), used)
    assert_nets_equal(nets[1], nets[0])


def test_parameters_added_later(devices: Devices) -> None:
    for net, optimizer in both(devices(2), lambda net: torch.optim.AdamW(net.linear.parameters(), lr=0.01)):
        train(net, optimizer, range(2))
        optimizer.add_param_group({"params": [*net.conv.parameters()], "lr": 0.1})
        train(net, optimizer, range(2, 4))
        net.fine.requires_grad_(False)
        train(net, optimizer, range(4, 6))


def test_parameters_that_leave_the_groups_and_come_back(devices: Devices) -> None:
    """As torch keeps their state meanwhile; a state dict has only what is in a group."""
    for net, optimizer in both(devices(2), lambda net: torch.optim.Adam(net.parameters(), lr=0.01)):
        train(net, optimizer, range(3))
        whole, num_states = optimizer.param_groups[0]["params"], len(optimizer.state_dict()["state"])
        optimizer.param_groups[0]["params"] = [p for p in whole if p is not net.linear.weight]
        for _ in range(2):  # as they left, and after an update without it
            if isinstance(optimizer, everygpu.ShardedOptimizer):
                assert len(optimizer.state_dict()["state"]) == num_states - 1
            train(net, optimizer, range(3, 4))
        optimizer.param_groups[0]["params"] = whole
        train(net, optimizer, range(4, 7))


def test_values_written_between_steps_are_seen(devices: Devices) -> None:
    for net, optimizer in both(devices(2), lambda net: torch.optim.Adam(net.parameters(), lr=0.01)):
        for step in range(4):
            train(net, optimizer, range(step, step + 1))
            net.linear.weight.data.clamp_(-0.1, 0.1)
            net.conv.weight.data = net.conv.weight.data * 0.5


def test_a_gradient_scaler_works_with_it(devices: Devices) -> None:
    used = devices(2)
    for net, optimizer in both(used, lambda net: torch.optim.AdamW([net.linear.weight, net.scale], lr=0.01)):
        scaler = torch.amp.GradScaler(used[0].type, init_scale=16.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(net.loss(step) * (float("inf") if step == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()


def test_a_closure_is_called_with_gradients_on(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    sharded = everygpu.ShardedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), used)
    before = net.linear.weight.detach().clone()

    def closure() -> Tensor:
        sharded.zero_grad()
        loss = net.loss(0)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = sharded.step(closure)
    assert loss.item() == pytest.approx(net.loss(0).item(), rel=0.9)
    assert not net.linear.weight.equal(before)


def test_hooks_of_both_are_called(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    stock = torch.optim.SGD(net.parameters(), lr=0.1)
    sharded = everygpu.ShardedOptimizer(stock, used)
    seen: list[str] = []
    stock.register_step_pre_hook(lambda o, a, k: seen.append(f"before {o is stock}"))
    stock.register_step_post_hook(lambda o, a, k: seen.append(f"after {o is stock}"))
    sharded.register_step_post_hook(lambda o, a, k: seen.append(f"wrapper {o is sharded}"))
    train(net, sharded, range(1))
    assert seen == ["before True", "after True", "wrapper True"]


def test_autograd_notices_the_update(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    sharded = everygpu.ShardedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), used)
    x = torch.randn(2, 40, device=used[0], requires_grad=True)
    loss = net.linear(x).square().sum()
    train(net, sharded, range(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_everything_goes_with_the_optimizer() -> None:
    net = Net()
    stock = torch.optim.AdamW(net.parameters())
    train(net, everygpu.ShardedOptimizer(stock, ["cpu", "cpu"]), range(1))
    gc.collect()
    assert len(stock.state_dict()["state"]) == 7, "the state outlives the wrapper, with the stock optimizer"


def test_saved_and_loaded_with_a_checkpoint(devices: Devices, tmp_path: Any) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    stock = torch.optim.AdamW(groups(plain))
    train(plain, stock, range(5))
    sharded = everygpu.ShardedOptimizer(torch.optim.AdamW(groups(ours)), used)
    train(ours, sharded, range(2))
    everygpu.save(tmp_path / "c", model=ours, optimizer=sharded)
    later = Net()
    fresh = torch.optim.AdamW(groups(later))
    everygpu.load(tmp_path / "c", model=later, optimizer=fresh)
    train(later, fresh, range(2, 5))
    assert_nets_equal(later, plain.cpu())


# What it refuses.


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    sharded = everygpu.ShardedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), ["cpu", "cpu"])
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match=r"dense.*parameter 0 of shape \(5, 3\).*stock optimizer"):
        sharded.step()


class MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.LBFGS(p),
        lambda p: torch.optim.SparseAdam(p),
        lambda p: MyAdam(p),
        lambda p: torch.optim.Adam(p, differentiable=True),
        lambda p: everygpu.ShardedOptimizer(torch.optim.SGD(p), ["cpu"]),
        lambda p: p,
    ],
)
def test_optimizers_that_cannot_be_sharded_are_refused(make: Any) -> None:
    with pytest.raises(OptimizerError, match="ShardedOptimizer: "):
        everygpu.ShardedOptimizer(make([nn.Parameter(torch.ones(2))]), ["cpu", "cpu"])


def test_devices_are_known_or_found_from_the_parameters() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    assert everygpu.ShardedOptimizer(optimizer).devices == [torch.device("cpu")]
    with pytest.raises(DeviceError):
        everygpu.ShardedOptimizer(optimizer, ["cpu", "nowhere"])


class Matrices(nn.Module):
    """All that is trained are matrices, of sizes that no two devices can share evenly.

    Their gradients have full rank, as Muon gives singular values of rounding errors the size of the others.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [40, 60, 10, 90, 20, 5]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))
        self.turned = nn.Parameter(torch.randn(7, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x @ self.turned

    def loss(self, step: int) -> Tensor:
        x = torch.randn(128, 40, generator=torch.Generator().manual_seed(step))
        return self(x.to(self.turned.device)).square().mean()


class Shampoo(torch.optim.Optimizer):
    """Has two preconditioners for each matrix, in a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["sides"] = [torch.eye(n, dtype=p.dtype, device=p.device) for n in p.shape]
                        state["num"] = 0
                    left, right = state["sides"]
                    left += p.grad @ p.grad.t()
                    right += p.grad.t() @ p.grad
                    state["num"] += 1
                    p -= group["lr"] * torch.linalg.solve(left, p.grad) @ torch.linalg.inv(right)


MATRIX_OPTIMIZERS: dict[str, Make] = {
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "Shampoo": Shampoo,
}


def newton_schulz(grad: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Compute Muon's orthogonal matrix in double precision."""
    a, b, c = coefficients
    x = grad.double() if grad.shape[0] <= grad.shape[1] else grad.double().T
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x if grad.shape[0] <= grad.shape[1] else x.T).to(grad.dtype)


@pytest.mark.parametrize(
    ("name", "count", "in_step"),
    [*itertools.product(MATRIX_OPTIMIZERS, [3], [False, True]), ("Muon", 1, True), ("Shampoo", 2, False)],
)
def test_whole_matrices(
    devices: Devices, name: str, count: int, in_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is updated by one device, as the stock optimizer does."""
    # In bfloat16, as torch has it, a gradient's last bits would count.
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz)
    used, make = devices(count), MATRIX_OPTIMIZERS[name]
    plain, ours = Matrices().to(used[0]), Matrices().to(used[0])
    stock, mine = make(plain.parameters()), make(ours.parameters())
    sharded = everygpu.ShardedOptimizer(mine, used, whole=True)
    train(plain, stock, range(6))
    if in_step:
        model = everygpu.DataParallel(ours, used)
        step = everygpu.TrainStep(model, lambda output, _: output.square().mean(), sharded)
        for i in range(6):
            x = torch.randn(128, 40, generator=torch.Generator().manual_seed(i)).to(used[0])
            step(x, x)
        assert step._strategy.is_spread
    else:
        train(ours, sharded, range(6))
    for p, q in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert sharded.state_dict()["state"].keys() == stock.state_dict()["state"].keys()
    copied = make(ours.parameters())
    copied.load_state_dict(sharded.state_dict())
    again = everygpu.ShardedOptimizer(make(ours.parameters()), used[:1], whole=True)
    again.load_state_dict(sharded.state_dict())
    train(plain, stock, range(6, 8))
    train(ours, again, range(6, 8))
    for p, q in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2])
def test_steps_on_whole_matrices_are_captured(capturing: Devices, count: int) -> None:
    used = capturing(count)
    found = []
    for capture in (False, "auto"):
        net = Matrices().to(used[0])
        model = everygpu.DataParallel(net, used)
        optimizer = torch.optim.Adafactor(net.parameters(), lr=0.02)
        step = everygpu.TrainStep(model, lambda output, _: output.square().mean(), optimizer, capture=capture)
        x = torch.randn(128, 40, generator=torch.Generator().manual_seed(0)).to(used[0])
        found.append([torch.stack([step(x, x) for _ in range(10)]), *net.parameters()])
        assert not capture or len(step._capture._graphs) == 1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_matrices_are_dealt_out_by_size(devices: Devices) -> None:
    used = devices(3)
    net = Matrices().to(used[0])
    sharded = everygpu.ShardedOptimizer(torch.optim.Muon(net.parameters()), used)
    train(net, sharded, range(1))
    held = [sum(v.nbytes for s in o.state.values() for v in s.values()) for o in sharded._shards.optimizers]
    assert sum(held) == sum(p.nbytes for p in net.parameters())
    assert max(held) < 1.5 * sum(held) / 3


def test_an_optimizer_that_takes_more_than_groups_is_refused(devices: Devices) -> None:
    class Needy(Shampoo):
        def __init__(self, params: Any, needed: float) -> None:
            super().__init__(params)

    net = Matrices().to(devices(2)[0])
    sharded = everygpu.ShardedOptimizer(Needy(net.parameters(), 1.0), devices(2), whole=True)
    with pytest.raises(OptimizerError, match="makes a Needy for each device .* Give its other arguments defaults"):
        train(net, sharded, range(1))
