"""Ways to train, everygpu's and its peers', each as fast as it is when written by hand.

To add one, write a function from ``Work`` to a step and name it in ``WAYS``.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import everygpu
from everygpu import tree
from everygpu.bench.training import Training, compute_loss, list_batches, move_batch, repeat_rows, split_batch
from everygpu.errors import BenchmarkError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Queues one training step when called, each on the next batch; the first comes after the last."""

    run: Callable[[Any], Tensor]
    """Called with a batch, returns the loss."""
    batches: Iterator[Any]
    """Endless."""
    net: Any
    """What trains."""

    def __call__(self) -> Tensor:
        return self.run(next(self.batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The parts of a training step."""

    training: Training
    devices: list[torch.device]
    """Those to train on; of one rank, its own."""
    precision: str = "fp32"
    """``"fp32"`` or ``"bf16"``, by autocast."""
    static_graph: bool | None = None
    """Whether every step uses the same parameters; None if that isn't known."""

    @property
    def home(self) -> torch.device:
        return self.devices[0]

    def place_model(self) -> nn.Module:
        """Move the model to the first device."""
        return self.training.model.to(self.home)

    def place_batches(self, num_devices: int = 1) -> list[Any]:
        """Make the batches of some devices, on the first one."""
        return [repeat_rows(move_batch(batch, self.home), num_devices) for batch in list_batches(self.training.batch)]


def usual_loop(work: Work, net: Callable[..., Any], batches: Sequence[Any], optimizer: Optimizer | None = None) -> Step:
    """The loop that every PyTorch script has, around a model however it is wrapped."""
    optimizer = optimizer or work.training.optimizer

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(work.home.type, torch.bfloat16, enabled=work.precision == "bf16"):
            loss = compute_loss(net, work.training.loss, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return Step(run=step, batches=itertools.cycle(batches), net=net)


def bare(work: Work) -> Step:
    return usual_loop(work, work.place_model(), work.place_batches())


def compiled(work: Work) -> Step:
    return usual_loop(work, torch.compile(work.place_model(), mode="reduce-overhead"), work.place_batches())


def whole_graph(work: Work) -> Step:
    """Three eager steps, then a CUDA graph of the whole step, for each batch shape; all share a memory pool.

    Source:
        "Whole-network capture" in torch's notes on CUDA semantics.
    """
    _needs_gpu(work, "graph")
    for group in work.training.optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    usual = usual_loop(work, work.place_model(), work.place_batches())
    side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
    counts: dict[str, int] = {}
    captured: dict[str, tuple[Any, torch.cuda.CUDAGraph, Tensor]] = {}

    def run(batch: Any) -> Tensor:
        key = str([(place, x.shape) for place, x in _tensors(batch)])
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= 3:  # cuDNN and cuBLAS choose their kernels, on a stream that capture may follow
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = usual.run(batch)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if key not in captured:
            static = tree.map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, batch)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                loss = usual.run(static)
            captured[key] = static, graph, loss
        static, graph, loss = captured[key]
        for (_, to), (_, x) in zip(_tensors(static), _tensors(batch)):
            to.copy_(x)
        graph.replay()
        return loss

    return Step(run=run, batches=usual.batches, net=usual.net)


def _tensors(batch: Any) -> list[tuple[str, Tensor]]:
    return [(place, x) for place, x in tree.leaves(batch, "") if isinstance(x, Tensor)]


def data_parallel(work: Work) -> Step:
    _needs_gpu(work, "dp")
    net = nn.DataParallel(work.place_model(), [d.index for d in work.devices])
    return usual_loop(work, net, work.place_batches(len(work.devices)))


def distributed(work: Work, *, compile: bool = False) -> Step:
    """What each process of DistributedDataParallel does, on its own device."""
    # Compiled, Dynamo cuts graphs where buckets end, which a static graph has none of.
    options: dict[str, Any] = {
        "find_unused_parameters": work.static_graph is False,
        "static_graph": bool(work.static_graph) > compile,
    }
    ids = [work.home] if work.home.type == "cuda" else None
    net: Any = nn.parallel.DistributedDataParallel(work.place_model(), ids, gradient_as_bucket_view=True, **options)
    return usual_loop(work, torch.compile(net) if compile else net, work.place_batches())


def fully_sharded(work: Work) -> Step:
    """FSDP2, block by block; parameters travel in bfloat16, but for BatchNorm's sake, which wants one dtype."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from everygpu.parallel.fully_sharded.options import find_groups

    model, optimizer = work.place_model(), work.training.optimizer
    names = {id(p): name for name, p in model.named_parameters()}
    has_norms = any(hasattr(m, "running_mean") for m in model.modules())
    dtype = torch.bfloat16 if work.precision == "bf16" and not has_norms else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
    mesh = init_device_mesh(work.home.type, (torch.distributed.get_world_size(),))
    for part in (*find_groups(model, None).blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    sharded = dict(model.named_parameters())
    groups = [{**g, "params": [sharded[names[id(p)]] for p in g["params"]]} for g in optimizer.param_groups]
    return usual_loop(work, model, work.place_batches(), type(optimizer)(groups))  # type: ignore[call-arg]


def loop(work: Work) -> Step:
    """One process with all devices; or, in each process under torchrun, what it does on its own one."""
    net = everygpu.DataParallel(work.training.model, work.devices)
    return usual_loop(work, net, _spread(work, net))


def train_step(work: Work, *, compile: bool = False) -> Step:
    """As ``loop``, by ``TrainStep``."""
    model, loss, optimizer, _ = work.training
    net = everygpu.DataParallel(model, work.devices, engine="compile" if compile else "auto")
    step = everygpu.TrainStep(net, loss, optimizer, precision=work.precision, compile=compile)

    def run(batch: Any) -> Tensor:
        inputs, targets = split_batch(batch)
        return step(inputs, *targets)

    return Step(run=run, batches=itertools.cycle(_spread(work, net)), net=step)


def _spread(work: Work, net: everygpu.DataParallel) -> list[Any]:
    """Put each device's samples on it already, as in DistributedDataParallel's ranks."""
    if len(work.devices) == 1:
        return work.place_batches()
    return list(everygpu.Feeder(work.place_batches(len(work.devices)), net))


def _needs_gpu(work: Work, way: str) -> None:
    if work.home.type != "cuda":
        raise BenchmarkError(f"It needs a GPU. Leave out --way {way}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to make a step, and where."""

    make: Callable[[Work], Step]
    title: str
    devices: str
    """``"one"``; ``"several"``, at least two; ``"any"``: one or more; ``"ranks"``: two or more, a process for each."""

    def num_devices(self, num_there: int) -> int:
        """How many devices it trains on; 0 if there are too few."""
        return 1 if self.devices == "one" else num_there * (num_there > 1 or self.devices == "any")


WAYS = {
    "bare": Way(make=bare, devices="one", title="one GPU, eager"),
    "graph": Way(make=whole_graph, devices="one", title="one GPU, a CUDA graph by hand"),
    "compiled": Way(make=compiled, devices="one", title='one GPU, torch.compile(mode="reduce-overhead")'),
    "dp": Way(make=data_parallel, devices="several", title="torch.nn.DataParallel"),
    "ddp": Way(make=distributed, devices="ranks", title="DistributedDataParallel"),
    "ddp_compiled": Way(
        make=lambda work: distributed(work, compile=True), devices="ranks", title="DistributedDataParallel, compiled"
    ),
    "fsdp2": Way(make=fully_sharded, devices="ranks", title="FSDP2"),
    "loop": Way(make=loop, devices="any", title="everygpu.DataParallel"),
    "step": Way(make=train_step, devices="any", title="everygpu.TrainStep"),
    "step_compiled": Way(
        make=lambda work: train_step(work, compile=True), devices="any", title="everygpu.TrainStep, compiled"
    ),
    "loop_ranks": Way(make=loop, devices="ranks", title="everygpu.DataParallel, one process per GPU"),
    "step_ranks": Way(make=train_step, devices="ranks", title="everygpu.TrainStep, one process per GPU"),
}


def engine_in_use(net: Any) -> str:
    """Name the engine that ran last: ``"threads"``, ``"capture"``, …; ``""`` for what has none."""
    if isinstance(net, everygpu.TrainStep):
        return net.stats().engine
    return net.engine_in_use if isinstance(net, everygpu.DataParallel) else ""
