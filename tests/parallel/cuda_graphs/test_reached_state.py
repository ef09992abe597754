"""Whatever a step reads, wherever Python keeps it: changed between steps, it counts at the next."""

import functools
import gc
import itertools
import math
import random
import threading
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu.parallel.cuda_graphs.batch_kinds import NUM_WARM_UPS
from everygpu.parallel.cuda_graphs.executed_code import ExecutedCode, is_left_out
from everygpu.parallel.cuda_graphs.reached_state import ReachedState
from tests.parallel.cuda_graphs.forwards import Devices
from tests.parallel.cuda_graphs.forwards import num_graphs as num_of_model
from tests.parallel.cuda_graphs.places import PLACES, Code, Place, number_of
from tests.parallel.replicas.test_snapshot import Color, Frozen, Named, Options, Pair, Plain, Slotted, holding, read
from tests.step.test_capture import num_graphs as num_of_step

WAYS = ["auto", "loss", "must", "capture"]
"""``TrainStep``'s default, where the model or the loss reads; ``capture=True``; ``engine="capture"``."""


class Model(nn.Module):
    def __init__(self, place: Place | None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if self.place is None else y * number_of(self.place.read())


class Run:
    """Takes steps of one way of training, with captures or without."""

    def __init__(self, place: Place, way: str, used: list[torch.device], *, captures: bool) -> None:
        torch.manual_seed(0)
        net = Model(None if way == "loss" else place).to(used[0])
        self.way, self.net = way, net
        engine = "capture" if captures and way == "capture" else "threads"
        self.model = everygpu.DataParallel(net, used, engine=engine)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.step: everygpu.TrainStep | None = None
        if way != "capture":
            capture: Any = captures and (way == "must" or "auto")
            self.step = everygpu.TrainStep(self.model, self.make_loss(place), self.optimizer, capture=capture)

    def make_loss(self, place: Place) -> Any:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            found = (output - target).square().mean()
            return found * number_of(place.read()) if self_reads else found

        self_reads = self.way == "loss"
        return loss

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self.step is not None:
            return self.step(x, y)
        loss = (self.model(x) - y).square().mean() + 0
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def num_captured(self) -> int:
        return num_of_model(self.model) if self.step is None else num_of_step(self.step)


def check(kind: type[Place], way: str, used: list[torch.device], seed: int, num_changes: int = 1) -> None:
    """Change a value at random between steps, of which all are to be those of eager ones."""
    chance = random.Random(f"{kind.__name__} {way} {seed}")
    place = kind()
    plain, captured = (Run(place, way, used, captures=c) for c in (False, True))
    generator = torch.Generator().manual_seed(seed)
    try:
        for change in range(num_changes + 1):
            if change:
                place.write(chance.choice(place.values))
            num = NUM_WARM_UPS + 5 if change == 0 else chance.randrange(1, NUM_WARM_UPS + 5)
            for _ in range(num):
                x, y = (torch.randn(4, n, generator=generator).to(used[0]) for n in (3, 2))
                found = captured(x, y)
                if not kind.is_written:
                    torch.testing.assert_close(found, plain(x, y), rtol=1e-5, atol=1e-6)
            if change == 0:
                assert captured.num_captured() == kind.is_seen
    finally:
        place.drop()


# Where the value is found is one code for all ways: each place has two of them, the slow tests have all.
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, way)
        for i, kind in enumerate(PLACES)
        for way in (
            "auto",
            "capture" if i % 2 and kind.is_seen else "loss",
        )  # of "capture", users say what doesn't change
    ],
)
def test_a_changed_value_counts(capturing: Devices, kind: type[Place], way: str) -> None:
    check(kind, way, capturing(1), seed=0)


@pytest.mark.parametrize("way", ["step", "capture"])
def test_a_batchs_number_counts_to_the_last_bit(capturing: Devices, way: str) -> None:
    class Signed(nn.Linear):
        def forward(self, x: Tensor, sign: float) -> Tensor:  # type: ignore[override]
            return super().forward(x) * math.copysign(1.0, sign)

    (used,) = capturing(1)
    net = Signed(3, 2).to(used)
    model = everygpu.DataParallel(net, [used], engine="capture")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    step = everygpu.TrainStep(model, lambda output, _: output.sum(), optimizer) if way == "step" else None
    x, found = torch.ones(4, 3, device=used), []
    for sign in [0.0] * (NUM_WARM_UPS + 2) + [-0.0]:
        if step is not None:
            found.append(step((x, sign), x).item())
        else:
            loss = model(x, sign).sum()
            loss.backward()
            found.append(loss.item())
    assert found[-1] == -found[-2]


def test_code_that_a_function_had_before_counts(capturing: Devices) -> None:
    """While it has code that hasn't run yet, nobody looks into it."""
    check(Code, "must", capturing(1), seed=5, num_changes=4)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [kind for kind in PLACES if kind.is_seen])
def test_values_that_change_again_and_again_count(capturing: Devices, kind: type[Place], way: str) -> None:
    for seed in range(1, 6 if capturing(1)[0].type == "cpu" else 3):
        check(kind, way, capturing(1 + seed % 2), seed, num_changes=4)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([[1]], lambda v: v[0].append(2)),
        ([[1]], lambda v: v[0].__setitem__(0, True)),
        ([[1], [2]], lambda v: v[1].append(v[0].pop())),
        ([[[]]], lambda v: v[0][0].append(1)),
        ({"a": {"b": 1}}, lambda v: v["a"].update(b=2)),
        ({"a": {"b": 1}}, lambda v: v["a"].update(c=v["a"].pop("b"))),
        (([1],), lambda v: v[0].append(2)),
        (({},), lambda v: v[0].update(a=1)),
        ([{1}], lambda v: v[0].add(2)),
        ([{1}], lambda v: (v[0].clear(), v[0].add(True))),
        (deque([1, 2]), lambda v: v.rotate()),
        (OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
        (defaultdict(list), lambda v: v["new"]),
        (Pair([1], 2), lambda v: v.x.append(2)),
        ([nn.Linear, Options], lambda v: v.__setitem__(0, nn.Conv2d)),
        ({"kind": nn.Linear}, lambda v: v.update(kind=nn.Conv2d)),
        ([len, read, torch.relu, str.upper], lambda v: v.__setitem__(0, max)),
        ([torch.float32, Color.RED, range(3), ...], lambda v: v.__setitem__(0, torch.float64)),
        ([numpy.float64(1)], lambda v: v.__setitem__(0, numpy.float64(1))),
        ([functools.partial(read, 1)], lambda v: v[0].keywords.update(shift=1)),
        ([[].append], lambda v: v[0](1)),
        (Named(a=1), lambda v: setattr(v, "note", 1)),
        ([Named(a=1)], lambda v: setattr(v[0], "note", 1)),
        ([Frozen([1])], lambda v: v[0].name.append(2)),
        ([Frozen(1)], lambda v: v.__setitem__(0, Frozen(1))),
        ([Slotted([1])], lambda v: v[0].name.append(2)),
        ([Plain(1)], lambda v: setattr(v[0], "name", 2)),
        ([Plain(Plain({}))], lambda v: v[0].name.name.update(a=1)),
        (lambda net: [net.inner], lambda v: v.append(v[0])),
        (lambda net: {"m": (net.inner,)}, lambda v: v.clear()),
        (lambda net: [net.inner.forward], lambda v: v.clear()),
        (lambda net: [weakref.ref(net.inner)], lambda v: v.clear()),
    ],
)  # fmt: skip
def test_change_at_any_depth(value: Any, change: Any) -> None:
    net = holding(value)
    state = ReachedState([net], list(net.parameters()), ExecutedCode())
    assert state.is_same()
    change(net.held)
    assert not state.is_same()
    assert state.find_change() is not None


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (lambda net: [net.inner.weight], lambda v: v.__setitem__(0, torch.ones(2, 2))),
        (lambda net: [[net.inner.weight, net.inner.bias]], lambda v: v[0].reverse()),
        (lambda net: {"w": net.inner.weight}, lambda v: v.update(w=v["w"].detach())),
        (lambda net: [weakref.ref(net.inner.weight)], lambda v: v.__setitem__(0, weakref.ref(v[0]().detach()))),
        (lambda net: [Plain(net.inner.weight)], lambda v: setattr(v[0], "name", None)),
    ],
)
def test_change_where_the_trees_own_tensors_are(value: Any, change: Any) -> None:
    test_change_at_any_depth(value, change)


@pytest.mark.parametrize("value", [itertools.count(), threading.RLock(), iter([]), array("d", [1])])
def test_what_hides_its_state_is_named(value: Any) -> None:
    net = holding([{"deep": value}])
    state = ReachedState([net], (), ExecutedCode())
    assert state.unseen == f"Net.held['deep'] is a {type(value).__qualname__}, whose state can't be seen"


def test_code_of_compilers_is_left_out() -> None:
    """Of Triton, too, whose kernels sum up several GPUs' gradients in a step."""
    packages = Path(torch.__file__).parents[1]
    assert all(is_left_out(str(packages / name)) for name in ("torch/nn/modules/linear.py", "triton/runtime/jit.py"))
    assert not is_left_out(str(packages / "transformers/modeling_utils.py"))


@pytest.mark.parametrize("caller", ["triton", "transformers"])
def test_what_triton_has_written_is_tritons(caller: str) -> None:
    """To look at a kernel's arguments it makes a function of a string, in a table without a name."""
    packages, scope, callers = Path(torch.__file__).parents[1], {}, {}
    exec("def dynamic_func(x):\n    return x, other", scope)
    source = "def run(f):\n    f.__globals__.update(other=2)\n    return f(1)"
    exec(compile(source, str(packages / caller / "runtime/jit.py"), "exec"), callers)
    code = ExecutedCode()
    with code.noting():
        callers["run"](scope["dynamic_func"])
    names = {f.__name__ for f in code.functions}
    assert names == (set() if caller == "triton" else {"run", "dynamic_func"})


def test_code_of_a_step_that_fails_is_known() -> None:
    code = ExecutedCode()

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError), code.noting():
        fail()
    assert code.version == 1
    assert code.functions == [fail]


def test_garbage_collection_is_no_part_of_a_step() -> None:
    code = ExecutedCode()

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            called.append("finalizer")

    def note(phase: str, info: dict[str, int]) -> None:
        called.append(phase)

    called: list[str] = []
    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        with code.noting():
            called.clear()
            Cycle()
            kept: list[list[int]] = [[] for _ in range(100)]
            within = list(called)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert len(kept) == 100
    assert not within
    assert gc.isenabled()
    assert not any(f.__name__ in ("note", "__del__") for f in code.functions)
