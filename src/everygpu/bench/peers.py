"""The compared ways of training, each as a function that makes its training step.

To add one, write a function from ``Work`` to a step and name it in ``PEERS``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import nn

import everygpu
from everygpu import tree
from everygpu.bench.batches import list_batches
from everygpu.bench.training import Training, compute_loss, move_batch, repeat_rows, split_batch
from everygpu.errors import BenchmarkError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Queues one training step when called, each on the next batch; the first comes after the last."""

    run: Callable[[Any], Any]
    """Called with a batch."""
    batches: Iterator[Any]
    """Endless."""
    net: Any = None
    """What trains; it may tell by which engine."""

    def __call__(self) -> Any:
        return self.run(next(self.batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The parts of a training step."""

    training: Training
    devices: list[torch.device]
    """Those to train on, the first for what is not spread."""
    precision: str
    """``"fp32"`` or ``"bf16"``, by autocast."""

    @property
    def home(self) -> torch.device:
        return self.devices[0]

    def place_model(self) -> nn.Module:
        """Move the model to the first device."""
        return self.training.model.to(self.home)

    def place_batches(self, num_devices: int) -> list[Any]:
        """Make the batches of some devices, on the first one."""
        return [repeat_rows(move_batch(batch, self.home), num_devices) for batch in list_batches(self.training.batch)]

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.home.type, torch.bfloat16, enabled=self.precision == "bf16")


def plain_step(work: Work, net: Callable[..., Any], batches: Sequence[Any], *, keep_grads: bool = False) -> Step:
    """The loop that every PyTorch script has.

    Args:
        work: The model's loss and optimizer.
        net: The model, however it is wrapped.
        batches: What the steps train on, in turn.
        keep_grads: Zero the gradients in place, so that their addresses stay.
    """
    optimizer = work.training.optimizer

    def step(batch: Any) -> Any:
        optimizer.zero_grad(set_to_none=not keep_grads)
        with work.autocast():
            loss = compute_loss(net, work.training.loss, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return Step(run=step, batches=cycle(batches), net=net)


def single(work: Work, *, compiled: bool = False) -> Step:
    net = work.place_model()
    return plain_step(work, torch.compile(net) if compiled else net, work.place_batches(1))


def single_graph(work: Work) -> Step:
    """The whole step captured: what one GPU can do without waiting for Python."""
    _need_one_shape(work)
    _need_gpu(work, "a CUDA graph")
    for group in work.training.optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    batches = work.place_batches(1)
    static = batches[0] if len(batches) == 1 else tree.map_leaves(_clone, batches[0])
    step = plain_step(work, work.place_model(), [static], keep_grads=True)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(batch: Any) -> None:
        if batch is not static:
            _copy_into(static, batch)
        graph.replay()

    return Step(run=replay, batches=cycle(batches))


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _copy_into(static: Any, batch: Any) -> None:
    for (_, target), (_, source) in zip(tree.leaves(static, ""), tree.leaves(batch, "")):
        if isinstance(target, torch.Tensor):
            target.copy_(source)


def data_parallel(work: Work) -> Step:
    _need_gpu(work, "torch.nn.DataParallel")
    net = nn.DataParallel(work.place_model(), [d.index for d in work.devices])
    return plain_step(work, net, work.place_batches(len(work.devices)))


def distributed(work: Work, *, compiled: bool = False) -> Step:
    """What each process of DistributedDataParallel does, on its own device."""
    ids = [work.home] if work.home.type == "cuda" else None
    net = nn.parallel.DistributedDataParallel(work.place_model(), ids, gradient_as_bucket_view=True)
    return plain_step(work, torch.compile(net) if compiled else net, work.place_batches(1))


def spread(work: Work, net: everygpu.DataParallel) -> list[Any]:
    """Put each device's rows on it already, as in DistributedDataParallel's rows."""
    return list(everygpu.Feeder(work.place_batches(len(work.devices)), net))


def ours(work: Work, *, compiled: bool = False, **options: Any) -> Step:
    model: Any = torch.compile(work.training.model) if compiled else work.training.model
    net = everygpu.DataParallel(model, work.devices, **options)
    return plain_step(work, net, spread(work, net))


def ours_in_ranks(work: Work) -> Step:
    """What each process under torchrun does, on its own device and rows."""
    return plain_step(work, everygpu.DataParallel(work.training.model, work.devices), work.place_batches(1))


def train_step(work: Work, engine: str = "auto", *, is_rank: bool = False, **options: Any) -> Step:
    model, loss, optimizer, _ = work.training
    net = everygpu.DataParallel(model, work.devices, engine="compile" if options.get("compile") else engine)
    step = everygpu.TrainStep(net, loss, optimizer, precision=work.precision, **options)

    def run(batch: Any) -> Any:
        inputs, targets = split_batch(batch)
        return step(inputs, *targets)

    has_one = is_rank and len(work.devices) == 1
    return Step(run=run, batches=cycle(work.place_batches(1) if has_one else spread(work, net)), net=step)


def engine_in_use(net: Any) -> str:
    """Name the engine that ran last: ``"threads"``, ``"graphs"``, …; ``""`` for what has none."""
    if isinstance(net, everygpu.TrainStep):
        return net.stats().engine
    return net.engine_in_use if isinstance(net, everygpu.DataParallel) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One row."""

    make: Callable[[Work], Step]
    is_single: bool = False
    """Whether it uses one GPU, however many there are."""
    is_distributed: bool = False
    """Whether it runs in several processes."""
    devices_per_process: int = 1
    """Of one that runs in several."""


PEERS = {
    "single": Peer(make=single, is_single=True),
    "single_compiled": Peer(make=lambda work: single(work, compiled=True), is_single=True),
    "single_graph": Peer(make=single_graph, is_single=True),
    "dp": Peer(make=data_parallel),
    "ddp": Peer(make=distributed, is_distributed=True),
    "ddp_compiled": Peer(make=lambda work: distributed(work, compiled=True), is_distributed=True),
    "ours": Peer(make=ours),
    "ours_compiled": Peer(make=lambda work: ours(work, engine="compile")),
    "ours_graphs": Peer(make=lambda work: ours(work, engine="graphs")),
    "ours_graphs_compiled": Peer(make=lambda work: ours(work, compiled=True, engine="graphs")),
    "ours_ranks": Peer(make=ours_in_ranks, is_distributed=True),
    "step": Peer(make=train_step),
    "step_uncaptured": Peer(make=lambda work: train_step(work, capture=False)),
    "step_ranks": Peer(make=lambda work: train_step(work, is_rank=True), is_distributed=True),
    "step_ranks_of_2": Peer(
        make=lambda work: train_step(work, is_rank=True), is_distributed=True, devices_per_process=2
    ),
    "step_compiled": Peer(make=lambda work: train_step(work, compile=True)),
}
WITHOUT_GPUS = ("single", "ddp", "ours", "step")
"""Those that run on the CPU, and need no compiler."""


def _need_gpu(work: Work, what: str) -> None:
    if work.home.type != "cuda":
        raise BenchmarkError(f"bench: {what} needs a GPU, got {work.home}. Leave this row out.")


def _need_one_shape(work: Work) -> None:
    """Refuse batches that differ: a CUDA graph reads memory of the sizes that it was captured with."""
    shapes = {_describe_shapes(batch) for batch in list_batches(work.training.batch)}
    if len(shapes) > 1:
        raise BenchmarkError(
            f"bench: a CUDA graph of a whole step needs batches of one shape, got {len(shapes)} different ones. "
            f"Leave this row out, or pad the batches to one length."
        )


def _describe_shapes(batch: Any) -> str:
    """Write what a captured step can't change: shapes and types of tensors, and everything else."""
    leaves = tree.leaves(batch, "batch")
    return repr([(path, (x.shape, x.dtype) if isinstance(x, torch.Tensor) else x) for path, x in leaves])
