"""The models, and the ways to train them, of rows.py; measures those of one model in a process of its own.

Needs of a commit only what users have, and bench's models, so that old and new ones can be measured alike.
"""

import copy
import faulthandler
import gc
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MARK = "ROW "
"""Begins the lines that are rows."""


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def classifier(
    name: str, rows: int, pixels: int, make_optimizer: Callable[..., Any], **options: Any
) -> tuple[Any, ...]:
    from torchvision.models import get_model

    model = get_model(name, weights=None, num_classes=100, **options).to(memory_format=torch.channels_last)
    images = torch.randn(rows, 3, pixels, pixels).to(memory_format=torch.channels_last)
    return model, cross_entropy, make_optimizer, [(images, torch.randint(0, 100, (rows,)))]


def resnet(name: str, rows: int, pixels: int) -> tuple[Any, ...]:
    return classifier(name, rows, pixels, lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, fused=True))


def vit(tiny: bool) -> tuple[Any, ...]:
    pixels = 32 if tiny else 224
    return classifier("vit_b_16", 4 if tiny else 32, pixels, adamw, image_size=pixels)


def bert(tiny: bool) -> tuple[Any, ...]:
    from everygpu.bench.workloads.bert import bert as make

    sizes = {"width": 32, "num_layers": 2, "num_heads": 2, "vocabulary": 100} if tiny else {}
    model, loss, _, batches = make(
        num_batches=8, rows=4 if tiny else 32, lengths=(8, 16) if tiny else (32, 256), **sizes
    )
    return model, loss, lambda m: torch.optim.AdamW(m.parameters(), lr=2e-5), batches.items


def gpt2(tiny: bool) -> tuple[Any, ...]:
    from everygpu.bench.workloads.gpt import GPT

    model = GPT(vocabulary=64, width=32, num_blocks=2, num_heads=2, length=16) if tiny else GPT()
    ids = torch.randint(0, 64 if tiny else 50304, (4, 17) if tiny else (8, 1025))
    make_optimizer = lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4, fused=True)  # noqa: E731
    return model, cross_entropy, make_optimizer, [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())]


def llama(tiny: bool) -> tuple[Any, ...]:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers = (64, 2) if tiny else (768, 12)
    config = LlamaConfig(vocab_size=100 if tiny else 32000, hidden_size=width, intermediate_size=width * 8 // 3,
                         num_hidden_layers=layers, num_attention_heads=width // 32 if tiny else 12,
                         num_key_value_heads=2 if tiny else 4, use_cache=False)  # fmt: skip
    ids = torch.randint(0, config.vocab_size, (4, 16) if tiny else (4, 512))
    return LlamaForCausalLM(config), None, adamw, [{"input_ids": ids, "labels": ids.clone()}]


class Experts(nn.Module):
    """Gives each token to one of several experts; how many an expert gets, the host reads."""

    def __init__(self, width: int, num_experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.sum().item():
                out[mine] = (expert(x[mine]) * weights[mine, None]).to(out.dtype)
        return x + out


def moe(tiny: bool) -> tuple[Any, ...]:
    width, rows = (16, 32) if tiny else (512, 4096)
    model = nn.Sequential(*(Experts(width) for _ in range(2 if tiny else 6)), nn.LayerNorm(width), nn.Linear(width, 10))
    return model, cross_entropy, adamw, [(torch.randn(rows, width), torch.randint(0, 10, (rows,)))]


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(super().forward(x))


def mlp(tiny: bool) -> tuple[Any, ...]:
    width, rows = (16, 8) if tiny else (512, 256)
    model = nn.Sequential(*(Residual(width, width) for _ in range(25)), nn.LayerNorm(width), nn.Linear(width, 10))
    return model, cross_entropy, adamw, [(torch.randn(rows, width), torch.randint(0, 10, (rows,)))]


WORKLOADS: dict[str, tuple[Callable[[bool], tuple[Any, ...]], str]] = {
    "resnet18": (lambda tiny: resnet("resnet18", 8 if tiny else 128, 32), "bf16"),
    "resnet50": (lambda tiny: resnet("resnet50", 8 if tiny else 64, 32 if tiny else 224), "bf16"),
    "vit_b_16": (vit, "bf16"),
    "bert": (bert, "bf16"),
    "gpt2": (gpt2, "bf16"),
    "llama": (llama, "bf16"),
    "mlp": (mlp, "fp32"),
    "moe": (moe, "fp32"),
}
"""Each makes a model, its loss (None where the model has it), what makes its optimizer, and batches, as
``everygpu bench`` takes them; and the precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a row trains."""

    model: nn.Module
    loss: Callable[..., Tensor] | None
    optimizer: torch.optim.Optimizer
    precision: str
    device_ids: list[str]


Step = tuple[Callable[[Any], Tensor], Any]
"""Trains on a batch and returns the loss; and what may tell its engine."""


def apply(function: Callable[..., Any], *trees: Any) -> Any:
    """Call a function with the tensors at each place of dicts and tuples."""
    if isinstance(trees[0], dict):
        return {key: apply(function, *(tree[key] for tree in trees)) for key in trees[0]}
    if isinstance(trees[0], tuple):
        return tuple(apply(function, *parts) for parts in zip(*trees))
    return function(*trees)


def plain(work: Work, net: nn.Module) -> Step:
    def step(batch: Any) -> Tensor:
        work.optimizer.zero_grad()
        with torch.autocast(work.device_ids[0].split(":")[0], torch.bfloat16, enabled=work.precision == "bf16"):
            if work.loss is None:
                loss = net(**batch).loss.mean()
            else:
                inputs, target = batch
                loss = work.loss(net(*inputs) if isinstance(inputs, tuple) else net(inputs), target)
        loss.backward()
        work.optimizer.step()
        return loss.detach()

    return step, net


def whole_graph(work: Work) -> Step:
    """Three steps as they are, then a CUDA graph of all of the step, for each shape of the batch."""
    for group in work.optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    step, _ = plain(work, work.model)
    side, pool, counts, recorded = torch.cuda.Stream(), torch.cuda.graph_pool_handle(), {}, {}

    def run(batch: Any) -> Tensor:
        key = repr(apply(lambda x: x.shape, batch))
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= 3:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = step(batch)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if key not in recorded:
            static, graph = apply(torch.clone, batch), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                loss = step(static)
            recorded[key] = static, graph, loss
        static, graph, loss = recorded[key]
        apply(Tensor.copy_, static, batch)
        graph.replay()
        return loss

    return run, None


def ddp(work: Work) -> Step:
    device_ids = [torch.device(work.device_ids[0])] if "cuda" in work.device_ids[0] else None
    is_sparse = any(isinstance(m, Experts) for m in work.model.modules())
    options = {"gradient_as_bucket_view": True, "find_unused_parameters": is_sparse}
    return plain(work, nn.parallel.DistributedDataParallel(work.model, device_ids, **options))


def loop(work: Work, engine: str = "auto") -> Step:
    import everygpu

    return plain(work, everygpu.DataParallel(work.model, work.device_ids, engine=engine))


def train_step(work: Work, **options: Any) -> Step:
    import everygpu

    net = everygpu.DataParallel(work.model, work.device_ids, engine="compile" if "compile" in options else "auto")
    step = everygpu.TrainStep(net, work.loss, work.optimizer, precision=work.precision, **options)
    return (step if work.loss is None else lambda batch: step(*batch)), step


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A way to train."""

    make: Callable[[Work], Step]
    replicas: int = 1
    ranks: int = 1
    compiles: bool = False
    needs_gpu: bool = False


ROWS = {
    "single": Row(make=lambda work: plain(work, work.model)),
    "single_graph": Row(make=whole_graph, needs_gpu=True),
    "loop": Row(make=loop),
    "graphs": Row(make=lambda work: loop(work, "capture"), needs_gpu=True),
    "step": Row(make=train_step),
    "step_compiled": Row(make=lambda work: train_step(work, compile=True), compiles=True),
    "loop_x2": Row(make=loop, replicas=2),
    "graphs_x2": Row(make=lambda work: loop(work, "capture"), replicas=2, needs_gpu=True),
    "step_x2": Row(make=train_step, replicas=2),
    "threads_x2": Row(make=lambda work: loop(work, "threads"), replicas=2),
    "ddp_r2": Row(make=ddp, ranks=2),
    "loop_r2": Row(make=loop, ranks=2),
    "step_r2": Row(make=train_step, ranks=2),
    "step_eager_r2": Row(make=lambda work: train_step(work, capture=False), ranks=2),
}


def say(**found: Any) -> None:
    """Print that a row begins, and what has come of it."""
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


def measure_rows(job: dict[str, Any]) -> None:
    """Measure rows of one model, in this process or as one rank."""
    import torch.distributed as dist

    rank, ranks, cards = int(os.environ.get("RANK", 0)), ROWS[job["rows"][0]].ranks, job["cards"]
    names = [f"cuda:{i}" for i in range(cards)] if "cuda" in job["device"] and cards > 1 else [job["device"]]
    device = torch.device(names[rank % len(names)])
    faulthandler.dump_traceback_later(job["timeout_s"], exit=True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    make, precision = WORKLOADS[job["workload"]]
    torch.manual_seed(0)
    model, loss, make_optimizer, batches = make(job["tiny"])
    share = (lambda x: x.chunk(ranks)[rank].to(device)) if ranks > 1 else (lambda x: x.to(device))
    model, batches = model.to(device), [apply(share, batch) for batch in batches]
    for name in job["rows"]:
        limit_s = job["timeout_s"] * (2 if ROWS[name].compiles else 1)
        faulthandler.dump_traceback_later(limit_s, exit=True)
        if rank == 0:
            say(row=name)
        trained = copy.deepcopy(model)
        device_ids = [names[(rank + i) % len(names)] for i in range(ROWS[name].replicas)]
        work = Work(
            model=trained, loss=loss, optimizer=make_optimizer(trained),
            precision="fp32" if job["tiny"] else precision, device_ids=device_ids,
        )  # fmt: skip
        try:
            outcome = measure(ROWS[name], work, batches, job)
        except Exception as error:  # noqa: BLE001 - is the row's outcome
            outcome = {"error": f"{type(error).__name__}: {error}"[:600]}
        if rank == 0 or "error" in outcome:
            say(row=name, **outcome)
        if ranks > 1 and "error" in outcome:
            os._exit(1)  # the other rank may wait for this one
        del trained, work
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()  # after an error on the device no other row can be measured here
            torch.cuda.empty_cache()
    if ranks > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as bench's ranks do: gloo's threads


def measure(row: Row, work: Work, batches: list[Any], job: dict[str, Any]) -> dict[str, Any]:
    """Train until everything is recorded, note the losses on the way, then time windows of steps."""
    import torch.distributed as dist

    on_gpu = "cuda" in work.device_ids[0]

    def wait() -> None:
        if row.ranks > 1:
            dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()

    def mean(loss: Tensor) -> float:
        value = loss.detach().double().mean().clone()
        if row.ranks > 1:
            dist.all_reduce(value)
        return value.item() / row.ranks

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    kept_bytes = torch.cuda.memory_allocated() if on_gpu else 0  # the weights, the batches, what rows before have left
    torch.manual_seed(1)
    step, net = row.make(work)
    endless, cycle = itertools.cycle(batches), len(batches)
    first = mean(step(next(endless)))
    warm_up = (2 if job["tiny"] else 6) * cycle if cycle > 1 else (6 if job["tiny"] else 30)
    num_timed = max(cycle, 3)
    for _ in range(warm_up - 1 - num_timed):
        step(next(endless))
    wait()
    begin = time.perf_counter()
    for _ in range(num_timed):
        loss = step(next(endless))
    last = mean(loss)
    found = [job["window_s"] / ((time.perf_counter() - begin) / num_timed)]
    if row.ranks > 1:
        dist.broadcast_object_list(found)
    steps = max(1, math.ceil(found[0] / cycle)) * cycle
    gc.collect()
    windows = []
    for _ in range(job["windows"]):
        wait()
        begin = time.perf_counter()
        for _ in range(steps):
            step(next(endless))
        if on_gpu:
            torch.cuda.synchronize()
        windows.append(round(1e3 * (time.perf_counter() - begin) / steps, 4))
    peak = (torch.cuda.max_memory_allocated() - kept_bytes) / 2**30 if on_gpu else 0.0
    return {
        "windows_ms": windows, "steps": steps, "warm_up": warm_up, "first_loss": first, "last_loss": last,
        "peak_gib": round(peak, 3), "note": engine_of(net), "versions": versions(on_gpu),
    }  # fmt: skip


def engine_of(net: Any) -> str:
    """Name the engine that ran last; "" for what isn't ours."""
    stats = getattr(net, "stats", None)
    return stats().engine if callable(stats) else getattr(net, "engine_in_use", "")


def versions(on_gpu: bool) -> dict[str, Any]:
    import everygpu

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0], "nccl": nccl}
    return {**found, "everygpu": everygpu.__version__}


if __name__ == "__main__":
    measure_rows(json.loads(sys.argv[1]))
