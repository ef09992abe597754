"""One bit of one replica's copy of a weight flips: an error names parameter and replica."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import everygpu
from everygpu.errors import DivergedError
from tests.faults.warned import warnings
from tests.step.test_step_edits import EDITS
from tests.step.test_train_step import Devices, assert_replicas_bit_equal
from tests.step.test_train_step import Net as PlainNet

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]

PARAMETERS = [
    "first.weight",
    "first.bias",
    "last.weight",
    "frozen",
    "turned",
    "small",
    "images",
    *(f"others.{i}" for i in range(len(DTYPES))),
]


class Net(nn.Module):
    """Has parameters of several dtypes, and shows those of each replica; replica j's rows have j in front."""

    def __init__(self, seen: dict[int, nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.frozen = nn.Parameter(torch.randn(7).to(torch.bfloat16), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(3, 4).t(), requires_grad=False)
        self.small = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
        self.images = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.others = nn.ParameterList(torch.randn(2, 3).to(dtype) for dtype in DTYPES)
        self.show: Callable[[int, nn.Module], Any] = lambda j, replica: seen.update({j: replica})

    def forward(self, x: Tensor) -> Tensor:
        self.show(int(x[0, 0]), self)
        extra = sum(p.abs().sum().float() for p in (*self.others, self.turned, self.small, self.images))
        return self.last(self.first(x[:, 1:]).tanh() * self.frozen.float()) + extra


class Trial:
    """A step on several replicas, and what happens between the loss of a step and its update."""

    def __init__(self, devices: list[torch.device], **options: Any) -> None:
        self.seen: dict[int, nn.Module] = {}
        self.net = Net(self.seen).to(devices[0])
        self.faults: list[Callable[[], Any]] = []
        self.model = everygpu.DataParallel(self.net, devices)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        # A captured step's loss is not called.
        options = {"capture": False, "check_every": 1, **options}
        self.step = everygpu.TrainStep(self.model, self.loss, optimizer, **options)
        rows = [(j, *torch.randn(5).tolist()) for j in range(len(devices)) for _ in range(2)]
        self.x, self.y = torch.tensor(rows), torch.randint(0, 3, (len(rows),))

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        while self.faults:
            self.faults.pop()()
        return F.cross_entropy(output, y)

    def train(self, *faults: Callable[[], Any]) -> float:
        self.faults[:] = faults
        return self.step(self.x, self.y).item()

    def bits(self, replica: int, name: str) -> Tensor:
        """Return a parameter's memory as integers."""
        p = self.seen[replica].get_parameter(name)
        return p.data.as_strided((p.numel(),), (1,)).view(INTEGERS[p.element_size()])

    def flip(self, replica: int, name: str, bit: int = 1, element: int = 0) -> Callable[[], Any]:
        """Return what flips one bit of a replica's copy."""

        def fault() -> None:
            bits = self.bits(replica, name)
            size = bits.element_size() * 8
            lowest = -(2 ** (size - 1)) if bit == size - 1 else 2**bit
            bits[element] = int(bits[element]) ^ lowest

        return fault


def test_any_bit_is_named() -> None:
    trials = [Trial([torch.device("cpu")] * num_replicas) for num_replicas in (2, 3)]
    first = {name: p.clone() for name, p in trials[0].net.state_dict().items()}
    for trial in trials:
        trial.train()

    @settings(max_examples=8)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        trial = data.draw(st.sampled_from(trials))
        trial.net.load_state_dict(first)
        replica = data.draw(st.sampled_from([j for j in trial.seen if j or len(trial.seen) > 2]))
        name = data.draw(st.sampled_from(PARAMETERS))
        bits = trial.bits(replica, name)
        place = data.draw(st.integers(0, bits.numel() - 1))
        bit = data.draw(st.integers(0, bits.element_size() * 8 - 1))
        with pytest.raises(DivergedError, match=rf"other bits of {name} in replica {replica} \(cpu\) than in replica"):
            trial.train(trial.flip(replica, name, bit, place))
        trial.net.load_state_dict(first)
        trial.train()

    check()


def test_two_copies_raise_and_a_checkpoint_goes_on(devices: Devices) -> None:
    trial = Trial(devices(2), check_every=2)
    trial.train()
    trial.train()
    saved = {name: p.clone() for name, p in trial.net.state_dict().items()}
    trial.train()
    with pytest.raises(DivergedError) as raised:
        trial.train(trial.flip(1, "first.weight", 31, 7))
    a, b = (f"replica {j} ({d})" for j, d in enumerate(trial.model.replica_devices))
    text = str(raised.value)
    assert f"got other bits of first.weight in {b} than in {a}. " in text
    assert "a checkpoint that is 2 updates old or older" in text
    trial.net.load_state_dict(saved)
    for _ in range(3):
        assert math.isfinite(trial.train())
    assert_replicas_bit_equal(trial.step)


def test_only_updates_that_are_due_compare(devices: Devices) -> None:
    trial = Trial(devices(2), check_every=3)
    for fault in (trial.flip(1, "last.bias"), trial.flip(0, "last.bias", 22)):
        trial.train()
        trial.train(fault)
        trial.train()
    trial.train()
    trial.train()
    with pytest.raises(DivergedError, match="last.bias"):
        trial.train(trial.flip(1, "last.bias"))


@pytest.mark.parametrize(("first", "second"), [(3.0, 2.0), (-1.0, 1.0), (-1.0, -1.0)])
@pytest.mark.parametrize("far", [2, 512, 2**19])
def test_flips_that_cancel_in_a_sum_of_words(first: float, second: float, far: int) -> None:
    """The lowest bit of two mantissas in opposite directions; and signs, which are the highest bits of two words."""
    net = nn.Linear(2, 3)
    net.register_parameter("table", nn.Parameter(torch.ones(2**20), requires_grad=False))
    places = [5, 5 + far]
    with torch.no_grad():
        net.table[places] = torch.tensor([first, second])
    faults = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        copy = step._strategy.copies()[id(net.table)][1].data.view(torch.int32)
        for place in faults:
            copy[place] ^= -(2**31) if abs(first) == 1 else 1 << 22
        return F.cross_entropy(output, y)

    model = everygpu.DataParallel(net, ["cpu"] * 3)
    step = everygpu.TrainStep(model, loss, torch.optim.SGD(net.parameters(), lr=0.1), check_every=1)
    step(torch.randn(6, 2), torch.zeros(6, dtype=torch.int64))
    faults += places
    with pytest.raises(DivergedError, match=r"of table in replica 1 \(cpu\)"):
        step(torch.randn(6, 2), torch.zeros(6, dtype=torch.int64))


def test_a_flip_that_two_share() -> None:
    trial = Trial([torch.device("cpu")] * 4)
    trial.train()
    with pytest.raises(DivergedError, match=r"of last.weight in replica 1 \(cpu\) and replica 2 \(cpu\) than in "):
        trial.train(trial.flip(1, "last.weight"), trial.flip(2, "last.weight"))
    trial = Trial([torch.device("cpu")] * 3)
    trial.train()
    with pytest.raises(DivergedError, match=r"of last.bias in replica 0 \(cpu\) than in replica 1"):
        trial.train(trial.flip(1, "last.bias"), trial.flip(2, "last.bias"))


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"clip_norm": 0.1}, {"precision": "bf16"}], ids=str)
def test_with_other_options(options: dict[str, Any]) -> None:
    trial = Trial([torch.device("cpu")] * 3, **options)
    trial.train()
    trial.train()
    trial.train()
    with pytest.raises(DivergedError, match="of frozen"):
        trial.train(trial.flip(1, "frozen"))
    trial.flip(1, "frozen")()
    trial.train()
    trial.train()


class Encoder(PlainNet):
    """Follows a trainable weight by a frozen one, as MoCo does, and clamps a trainable one."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.3, 0.3)
            self.frozen.data = self.frozen.data * 0.9 + self.first.bias.data * 0.1
        return super().forward(x)


def test_writes_of_the_loss_are_no_flips(devices: Devices) -> None:
    """They reach the primary alone, and are sent before copies are compared."""
    trial, plain = Trial(devices(3)), Trial(devices(3), check_every=None)

    def write(net: Net) -> None:
        with torch.no_grad():
            net.first.bias.mul_(0.5)
            net.last.bias.data = net.last.bias.data * 0.5

    with warnings() as lines:
        for _ in range(3):
            assert trial.train(lambda: write(trial.net)) == pytest.approx(plain.train(lambda: write(plain.net)))
    assert not [line for line in lines if "other bits" in line]
    for ours, expected in zip(trial.net.parameters(), plain.net.parameters()):
        torch.testing.assert_close(ours, expected)


ALL_EDITS = {**EDITS, "refresh": None, "in forward": None}


@pytest.mark.parametrize("edit", ALL_EDITS)
def test_edits_are_no_flips(devices: Devices, edit: str) -> None:
    used = devices(3)
    nets, losses = [], []
    with warnings() as lines:
        for check_every in (1, None):
            torch.manual_seed(0)
            net = (Encoder if edit == "in forward" else PlainNet)().to(used[0])
            model = everygpu.DataParallel(net, used)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            step = everygpu.TrainStep(model, F.cross_entropy, optimizer, check_every=check_every)
            x, y = torch.randn(9, 6, device=used[0]), torch.randint(0, 5, (9,), device=used[0])
            for _ in range(3):
                losses.append(step(x, y).item())
                with torch.no_grad():
                    if ALL_EDITS[edit] is not None:
                        ALL_EDITS[edit](net)
                if used[0].type == "cuda":
                    step.refresh()  # after writes that torch doesn't count
                if edit == "refresh":
                    step.refresh()
                    step.evaluate(x, y)
                    step.load_state_dict(step.state_dict())
            nets.append(net)
    assert not [line for line in lines if "bits" in line]
    assert losses[:3] == pytest.approx(losses[3:])
    for ours, expected in zip(*(net.parameters() for net in nets)):
        torch.testing.assert_close(ours, expected)


def test_where_there_is_nothing_to_compare() -> None:
    for count, kind in ((1, torch.optim.SGD), (2, type("Own", (torch.optim.SGD,), {}))):
        net = PlainNet()
        model = everygpu.DataParallel(net, ["cpu"] * count)
        with warnings() as lines:
            step = everygpu.TrainStep(model, F.cross_entropy, kind(net.parameters(), lr=0.1), check_every=5)
        assert lines == ["TrainStep: check_every=5 compares nothing: parameters are kept on cpu alone."]
        step(torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))
