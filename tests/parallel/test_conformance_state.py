"""What torch and Python keep per thread: autocast, grad mode, devices, seeds."""

import contextlib
import contextvars
import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _device as device_module

import everygpu
from tests.parallel.oracle import Returning, assert_same, assert_same_grads, pair, rows, score

pytestmark = pytest.mark.usefixtures("in_threads")

ASKED = contextvars.ContextVar("ASKED", default="nothing")


class Tell(nn.Module):
    """Returns one answer per replica: a value where all agree, a list where they differ."""

    def __init__(self, ask) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.ask = ask

    def forward(self, x):
        return self.lin(x), self.ask(self, x)


def told(ask, devs, **options):
    """Make a model whose replicas answer a question, float32 as autocast wants it."""
    return everygpu.DataParallel(Tell(ask).to(devs[0]), devs, **options)


def facts(module, x):
    """Tell what a thread has of its own."""
    kind = x.device.type
    made = [torch.ones(2), torch.arange(3), torch.tensor([1.0]), torch.empty(0), torch.randn(1), torch.zeros(1, 2)]
    return (
        (str(module.lin(x).dtype), module.lin(x).requires_grad),
        (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()),
        (torch.is_autocast_enabled("cpu"), str(torch.mm(torch.ones(2, 2).cpu(), torch.ones(2, 2).cpu()).dtype)),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        (str(torch.get_default_dtype()), torch.is_anomaly_enabled(), ASKED.get()),
        {t.device == x.device for t in made},
    )


@contextlib.contextmanager
def everything(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


@contextlib.contextmanager
def double_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def asked():
    token = ASKED.set("from the caller")
    yield
    ASKED.reset(token)


def cast(dtype=torch.bfloat16, **options):
    return lambda: torch.autocast("cuda" if torch.cuda.is_initialized() else "cpu", dtype, **options)


CONTEXTS = {
    "nothing": [],
    "bfloat16": [cast()],
    "float16": [cast(torch.float16)],
    "no cache": [cast(cache_enabled=False)],
    "off": [cast(enabled=False)],
    "off inside": [cast(), cast(enabled=False)],
    "of the CPU": [lambda: torch.autocast("cpu", torch.bfloat16)],
    "no_grad": [torch.no_grad],
    "enable_grad": [torch.no_grad, torch.enable_grad],
    "inference": [torch.inference_mode],
    "inference, left": [torch.inference_mode, lambda: torch.inference_mode(False), torch.no_grad],
    "grad in inference": [torch.inference_mode, torch.enable_grad],
    "default dtype": [double_by_default],
    "context variable": [asked],
}
UNCHANGED = ("nothing", "enable_grad", "off", "off inside")
"""Those that leave what there is by default."""


@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
def test_every_replica_has_what_the_caller_has(devs, contexts):
    model = told(facts, devs)
    x = rows(7, 3, device=devs[0]).float()
    before = model(x)[1]
    with everything(*contexts), devs[0]:
        out, found = model(x)
        assert found == facts(model.module, x)
        assert out.is_inference() is torch.is_inference_mode_enabled()
    assert (found == before) is (contexts in [CONTEXTS[name] for name in UNCHANGED])
    if out.requires_grad:
        out.double().sum().backward()
        assert model.module.lin.weight.grad.dtype is torch.float32
    assert model(x)[1] == before, "nothing stays in the threads"


def test_default_device(devs):
    model = told(lambda module, x: sorted({t.device.type for t in (torch.ones(2), torch.randn(1))}), devs)
    x = rows(7, 3, device=devs[0]).float()
    with torch.device("meta"):
        assert model(x)[1] == ["meta"]
    torch.set_default_device("meta")
    try:
        assert model(x)[1] == ["meta"]
    finally:
        torch.set_default_device(None)
    assert model(x)[1] == [devs[0].type], "nothing stays in the threads"
    assert device_module.CURRENT_DEVICE is None
    assert torch.ones(1).device.type == "cpu"


def test_autocast_gradients_equal_one_device(devs):
    model, bare = pair(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), devs)
    for m in (model, bare):
        m.float()
        x = rows(8, 3, device=devs[0]).float()
        for _ in range(2):
            with torch.autocast(devs[0].type, torch.bfloat16):
                out = m(x)
            out.float().square().mean().backward()
            with torch.no_grad(), torch.autocast(devs[0].type, torch.bfloat16):
                m(x)
            for p in m.parameters():
                p.data.add_(0.5)
    for ours, theirs in zip(model.parameters(), bare.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.02, atol=0.02)


def test_training_after_inference_mode(devs, x):
    model, bare = pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval(), devs)
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(model(x), bare(x))
        for m in (model, bare):
            with torch.no_grad():
                for p in m.parameters():
                    p.add_(0.1)
        assert_same(model, bare, x)


def test_buffers_are_written_after_inference_mode(devs):
    model, _ = pair(lambda: nn.BatchNorm1d(3), devs)
    x = rows(2 * len(devs), 3, device=devs[0])
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()
    assert model.module.num_batches_tracked == 2


def test_a_module_made_in_inference_mode(devs):
    with torch.inference_mode():
        model, bare = pair(lambda: nn.Linear(3, 2), devs)
        x = rows(7, 3, device=devs[0])
        torch.testing.assert_close(model(x), bare(x))
    with torch.no_grad():
        torch.testing.assert_close(model(x), bare(x))


class Swap(TorchFunctionMode):
    """Runs sigmoid where relu is called, times a number."""

    def __init__(self, by) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.relu:
            return torch.sigmoid(*args) * self.by
        return func(*args, **(kwargs or {}))


class Add(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out + 1 if func is torch.relu else out


@pytest.mark.parametrize("modes", [[Swap(2)], [Swap(2), Add()], [Add(), Swap(3)], [Add(), Add()]])
def test_function_modes_are_in_force_in_every_replica(devs, x, modes):
    model = everygpu.DataParallel(Returning(lambda x: torch.relu(x)), devs)
    with everything(*(lambda mode=mode: mode for mode in modes)):
        torch.testing.assert_close(model(x), torch.relu(x))
        assert not torch.equal(everygpu.parallel.gather(model(x)), x.clamp(min=0))
    torch.testing.assert_close(model(x), x.relu())


def test_saved_tensors_hooks(model, bare, x):
    packing, unpacked = set(), []

    def pack(t):
        packing.add(threading.get_ident())
        return t.cpu(), t.device

    def unpack(packed):
        unpacked.append(1)
        return packed[0].to(packed[1])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out, expected = model(x), bare(x)
    assert len(packing) == 3
    with torch.autograd.graph.save_on_cpu():
        out, expected = out + model(x), expected + bare(x)
    score(expected).backward()
    assert unpacked
    score(out).backward()
    assert_same_grads(model, bare)
    packing.clear()
    model(x)
    assert not packing, "nothing stays in the threads"


def device_facts(module, x):
    here = torch.cuda.current_device()
    stream = torch.cuda.current_stream()
    return [
        (
            x.device.index,
            here,
            stream.device.index,
            torch.ones(1).cuda().device.index,
            torch.ones(1, device="cuda").device.index,
            next(module.parameters()).device.index,
        )
    ]


@pytest.mark.gpu
@pytest.mark.cards(2)
def test_every_thread_has_its_device_set():
    count = torch.cuda.device_count()
    devs = [torch.device("cuda", i) for i in range(count)]
    model = told(device_facts, devs)
    with torch.cuda.device(1):
        out = model(torch.ones(2 * count, 3, device=devs[0]))[1]
        assert torch.cuda.current_device() == 1, "the caller's device is as before"
    (answers,) = out
    assert answers == (list(range(count)),) * 6


@pytest.mark.gpu
@pytest.mark.cards(2)
def test_no_memory_on_devices_that_take_no_part():
    last = torch.cuda.device_count() - 1
    used = torch.cuda.memory_allocated(0)
    model = everygpu.DataParallel(nn.Linear(1024, 1024), [last])
    model(torch.ones(8, 1024)).sum().backward()
    assert torch.cuda.memory_allocated(0) == used


@pytest.mark.gpu
@pytest.mark.cards(2)
def test_work_runs_on_the_callers_stream():
    devs = [torch.device("cuda", i) for i in range(2)]
    side = [torch.cuda.Stream(d) for d in devs]
    model = told(lambda module, x: [torch.cuda.current_stream(x.device).cuda_stream], devs)
    with torch.cuda.stream(side[1]), torch.cuda.stream(side[0]):
        (answers,) = model(torch.ones(4, 3, device=devs[0]))[1]
    assert answers == [s.cuda_stream for s in side]


class Slow(nn.Module):
    """Takes long on the GPU, and is queued at once."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        torch.cuda._sleep(NUM_SLOW_CYCLES)
        return x * self.factor


NUM_SLOW_CYCLES = 10**8


@pytest.mark.gpu
def test_work_comes_in_turn_with_that_on_the_callers_streams(shared_gpus):
    devs = shared_gpus(2)
    side = [torch.cuda.Stream(d) for d in devs]
    model = everygpu.DataParallel(Slow().to(devs[0]), devs)
    found = []
    with torch.cuda.stream(side[1]), torch.cuda.stream(side[0]):
        x = torch.zeros(4, 3, device=devs[0])
        for i in range(3):
            torch.cuda._sleep(NUM_SLOW_CYCLES)
            x.fill_(i)
            out = model(x)
            out.sum().backward()
            found.append([shard.detach().clone() for shard in out.shards])
            x.fill_(-1)
    for d in devs:
        torch.cuda.synchronize(d)
    assert [[shard.unique().tolist() for shard in shards] for shards in found] == [[[2 * i]] * 2 for i in range(3)]
    assert model.module.factor.grad.item() == 12 * (0 + 1 + 2)


@pytest.mark.gpu
@torch.no_grad()
def test_forwards_on_one_stream_after_another(shared_gpus):
    devs = shared_gpus(2)
    model = everygpu.DataParallel(Slow().to(devs[0]), devs)
    model(torch.zeros(4, 3, device=devs[0]))
    found = []
    for i in range(1, 4):
        side = [torch.cuda.Stream(d) for d in devs]
        with torch.cuda.stream(side[1]), torch.cuda.stream(side[0]):
            torch.cuda._sleep(NUM_SLOW_CYCLES // i)  # the work of each stream is there before that of the one before
            found.append([shard.clone() for shard in model(torch.full((4, 3), float(i), device=devs[0])).shards])
    for d in devs:
        torch.cuda.synchronize(d)
    assert [[shard.unique().tolist() for shard in shards] for shards in found] == [[[2 * i]] * 2 for i in (1, 2, 3)]


@pytest.mark.parametrize("seed", [everygpu.seed_all, torch.manual_seed])
def test_dropout_masks_differ_between_replicas_and_repeat_under_a_seed(devs, seed):
    x = torch.ones(6 * len(devs), 20, device=devs[0])
    model, runs = everygpu.DataParallel(nn.Dropout(), devs), []
    for number in (7, 7, 8):
        seed(number)
        runs.append([model(x) for _ in range(3)])
    seed(7)
    anew = everygpu.DataParallel(nn.Dropout(), devs)
    runs.append([anew(x) for _ in range(3)])
    for out in runs[0]:
        masks = out.chunk(len(devs))
        assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    for first, second, other, of_a_new_model in zip(*runs):
        assert torch.equal(first, second)
        assert not torch.equal(first, other)
        assert torch.equal(first, of_a_new_model)
    assert not torch.equal(runs[0][0], runs[0][1])


class Keeping(nn.Module):
    """Keeps an activation with its graph, in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.last = self.kept = self.first(x)
        return self.second(self.last)


def test_an_activation_that_is_kept_with_its_graph(devs, x, caplog):
    model, bare = pair(Keeping, devs)
    for _ in range(3):
        for m in (model, bare):
            m.zero_grad()
            score(m(x)).backward()
        assert_same_grads(model, bare)
    said = [r.getMessage() for r in caplog.records if "left rows of the batch in kept, last" in r.getMessage()]
    assert len(said) == 1
