"""Everything that is measured and checked on a box of several GPUs, in calls of under ten minutes that go on.

    python benchmarks/all.py --folder out                  # all GPUs; again, until nothing is left
    python benchmarks/all.py --folder out --gpus 4         # the first four; a folder for each number of GPUs
    python benchmarks/all.py --folder try --cpu 2          # replicas on the CPU, small: whether it runs
    python benchmarks/all.py --folder out --report FILE.md # measures nothing: what the folder holds, against the goals

A call runs the parts that the folder has no record of, the most important first, each in processes of its own with
its own time limit, and begins none that might end after ``--minutes``. What a part prints is shown as it comes and
kept in ``PART.txt``, its figures in ``PART.rows.json``, how it ended in ``PART.json``.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EAGER = ("single", "single_graph", "dp", "ddp", "ours", "step", "ours_ranks", "step_ranks")
COMPILED = ("single_compiled", "ddp_compiled", "step_compiled")
FURTHER = ("bert", "vit", "efficientnet", "unet", "llama", "lstm", "moe")
LONGEST_S = 560
_GRACE_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command with its time limit."""

    name: str
    command: list[str]
    """After ``python``; ``{rows}`` stands for the file that figures go to."""
    seconds: int
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Box:
    """What there is to measure on."""

    count: int
    on_cpu: bool

    def pick(self, on_gpus: str, on_cpu: str) -> list[str]:
        """Return the options of a command for this box."""
        return (on_cpu if self.on_cpu else on_gpus).format(n=self.count).split()


def list_parts(box: Box) -> Iterator[Part]:
    """Yield all parts, the most important first."""
    if box.on_cpu:
        yield bench(box, "tiny", ("single", "ddp", "ours", "step", "ours_ranks", "step_ranks"))
    else:
        yield from list_main_models(box)
        yield from (bench(box, model, EAGER) for model in FURTHER)
    yield from list_soaks(box)
    if not box.on_cpu:
        yield from list_tests()
    yield from list_scripts(box)
    yield from list_commands()
    if not box.on_cpu:
        yield from (bench(box, model, ("single", *COMPILED), "-compiled") for model in FURTHER)


def list_main_models(box: Box) -> Iterator[Part]:
    rank_rows = () if box.count % 2 else ("step_ranks_of_2",)
    for model in ("gpt2", "resnet50", "resnet18"):
        yield bench(box, model, (*EAGER, *COMPILED, *rank_rows))
    rows = ("single", "single_compiled", "ddp", "ddp_compiled", "ours", "step", "step_compiled")
    yield bench(box, "gpt2", rows, "-64-rows", "--rows", "64")
    yield bench(box, "gpt2-xl", ("single", "ddp", "ours", "step"))
    without = bench(box, "resnet18", ("ddp", "ours", "step"), "-without-p2p")
    yield Part(**{**vars(without), "environ": {"NCCL_P2P_DISABLE": "1"}})


def bench(box: Box, model: str, rows: tuple[str, ...], suffix: str = "", *options: str) -> Part:
    """Measure a model's rows in one run."""
    chosen = [word for row in rows for word in ("--peer", row)]
    size = box.pick("--gpus {n}", "--cpu --gpus {n} --steps 2")
    command = ["-m", "everygpu", "bench", "--model", model, *size, *chosen, *options, "--timeout", "150"]
    return Part(name=model + suffix, command=[*command, "--json", "{rows}"], seconds=min(LONGEST_S, 60 * len(rows)))


def list_soaks(box: Box) -> Iterator[Part]:
    """Long runs: nothing hangs or grows, and replicas stay equal."""
    size = box.pick("--steps 10000", "--replicas {n} --steps 30")
    ways = {"loop": [], "graphs": ["--engine", "graphs"], "train-step": ["--train-step"]}
    for name, options in ways.items():
        if not (box.on_cpu and name == "graphs"):
            yield Part(name=f"soak-{name}", command=["benchmarks/soak.py", *size, *options], seconds=300)


def list_tests() -> Iterator[Part]:
    """The tests that need GPUs; those marked ``alone`` one by one, at the end."""
    options = ["-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=short"]
    workers = ["-n", "8", "--dist=loadfile"] if importlib.util.find_spec("xdist") else []
    folders = {
        "parallel": ["tests/parallel"],
        "step": ["tests/step", "tests/ranks", "tests/comm"],
        "rest": [
            "tests/feed", "tests/devices", "tests/checkpoint", "tests/faults", "tests/cli", "tests/watchdog",
            "tests/tracing", "tests/bench", "tests/examples",
        ],
        "clients": ["tests/clients"],
    }  # fmt: skip
    for name, paths in folders.items():
        command = ["-m", "pytest", "-m", "gpu and not alone", *paths, *options, *workers]
        yield Part(name=f"tests-{name}", command=command, seconds=LONGEST_S)
    yield Part(name="tests-alone", command=["-m", "pytest", "-m", "gpu and alone", "tests", *options], seconds=300)


def list_scripts(box: Box) -> Iterator[Part]:
    """The scripts beside this one."""
    tiny_growth = "--cpu 1 {n} --blocks 1 --length 8 --widths 32 --rows 2 --rounds 2 --steps 1"
    sizes = {
        "feeding": box.pick("--gpus {n}", "--cpu {n} --models tiny --steps 3 --rounds 3"),
        "growth": box.pick("", tiny_growth),
    }
    for name, options in sizes.items():
        yield Part(name=name, command=[f"benchmarks/{name}.py", *options, "--json", "{rows}"], seconds=300)
    if not box.on_cpu:
        options = ["--millions", "124", "1500", "--dtypes", "float32", "bfloat16", "--timeout", "60"]
        yield Part(name="update", command=["benchmarks/update.py", *options, "--json", "{rows}"], seconds=300)
    checks = box.pick("", "--width 64 --turns 5")
    yield Part(name="replica-checks", command=["-m", "benchmarks.replica_checks", *checks], seconds=120)
    saves = box.pick("--device cuda", "--bytes 10000000 --rounds 3")
    yield Part(name="checkpoints", command=["-m", "benchmarks.checkpoints", *saves], seconds=300)
    families = box.pick("", "--model transformer --family torch")
    yield Part(name="families", command=["benchmarks/families.py", *families], seconds=300)


def list_commands() -> Iterator[Part]:
    """What docs/devices.md shows."""
    for name, *options in (("devices",), ("doctor",), ("top", "--once")):
        yield Part(name=name, command=["-m", "everygpu", name, *options], seconds=120)


def run_part(part: Part, folder: Path, visible: dict[str, str], about: dict[str, Any]) -> dict[str, Any]:
    """Run a part, show and keep what it prints, and write and return how it ended.

    Args:
        part: What to run.
        folder: Where its files go.
        visible: Environment variables that choose the GPUs.
        about: Machine, versions and commit, to be written with it.
    """
    rows = folder / f"{part.name}.rows.json"
    command = [sys.executable, *(str(rows) if word == "{rows}" else word for word in part.command)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **visible, **part.environ}
    begin = time.monotonic()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True, **pipes)
    reader = threading.Thread(target=_copy, args=(process, folder / f"{part.name}.txt"), daemon=True)
    reader.start()
    try:
        code: int | None = process.wait(part.seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
    reader.join(_GRACE_S)
    end = "done" if code == 0 else "timed out" if code is None else "failed"
    seconds = round(time.monotonic() - begin, 1)
    record = {"name": part.name, "command": command[1:], "end": end, "exit": code, "seconds": seconds, **about}
    (folder / f"{part.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def _copy(process: "subprocess.Popen[str]", path: Path) -> None:
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    with path.open("w") as file, process.stdout as lines:
        for line in lines:
            print(line, end="", flush=True)
            file.write(line)
            file.flush()


def _end(process: "subprocess.Popen[str]") -> None:
    """End what a part has left: politely first, as `everygpu bench` then ends the processes of its row."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


def run_all(parts: list[Part], options: argparse.Namespace, visible: dict[str, str], about: dict[str, Any]) -> None:
    """Run what fits into this call; say what is left."""
    deadline, left = time.monotonic() + 60 * options.minutes, []
    for part in parts:
        if not is_due(options.folder / f"{part.name}.json", again=options.again):
            continue
        if time.monotonic() + part.seconds > deadline:
            left.append(part.name)
            continue
        print(f"\n== {part.name}, at most {part.seconds} s", flush=True)
        record = run_part(part, options.folder, visible, about)
        print(f"== {part.name}: {record['end']} in {record['seconds']:.0f} s", flush=True)
    print(f"\nleft for another call: {', '.join(left) or 'nothing'}", flush=True)


def is_due(record: Path, *, again: bool) -> bool:
    """Tell whether a part has no record yet, or a bad one that is to be tried again."""
    return not record.exists() or (again and json.loads(record.read_text())["end"] != "done")


def choose_gpus(count: int) -> dict[str, str]:
    """Make the first so many of the visible GPUs all there are."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[:count])}


def describe_apart(visible: dict[str, str], commit: str | None) -> dict[str, Any]:
    """Describe machine and versions from another process: one that asks CUDA for a name holds memory of the GPU."""
    code = f"import json; from everygpu.bench.report import describe_machine as d; print(json.dumps(d({commit!r})))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **visible}
    done = subprocess.run([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return {"machine": json.loads(done.stdout.splitlines()[-1])}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for records, figures and what was printed")
    parser.add_argument("--minutes", type=float, default=9.5, help="no part begins that might end later")
    parser.add_argument("--gpus", type=int, metavar="N", help="the first N; all by default")
    parser.add_argument("--cpu", type=int, metavar="N", help="replicas on the CPU, instead of GPUs")
    parser.add_argument("--only", nargs="+", metavar="PART", help="in place of all")
    parser.add_argument("--again", action="store_true", help="also what has failed or run out of time")
    parser.add_argument("--list", action="store_true", help="print the parts, and run nothing")
    parser.add_argument("--commit", help="on machines without git")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="write the folder's report, and run nothing")
    return parser.parse_args()


def find_box(options: argparse.Namespace) -> Box:
    if options.cpu:
        return Box(count=options.cpu, on_cpu=True)
    import torch

    there = torch.cuda.device_count()
    if not there or (options.gpus or 1) > there:
        raise SystemExit(f"{options.gpus or 'no'} GPUs asked for, {there} there: --cpu 2 shows on the CPU that it runs")
    return Box(count=options.gpus or there, on_cpu=False)


def main() -> None:
    options = parse()
    if options.report:
        from benchmarks.goals import write_report

        options.report.write_text(write_report(options.folder))
        return
    box = find_box(options)
    parts = [part for part in list_parts(box) if not options.only or part.name in options.only]
    if options.list or not parts:
        print("\n".join(f"{part.name:24} {part.seconds:4} s  {' '.join(part.command)}" for part in parts) or "no part")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    visible = {} if box.on_cpu else choose_gpus(box.count)
    run_all(parts, options, visible, describe_apart(visible, options.commit))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    main()
