"""What a training step of eight models takes on one card, row by row, one commit beside another.

python benchmarks/rows.py --out benchmarks/results/NAME.json --source ../before=29a5692 --source . --resume
python benchmarks/rows.py --compare benchmarks/results/NAME.json --before 29a5692 --after 3b1c7aa

Each source is a checkout, whose src/ is imported by processes of its own; sources take turns. Without --cards 2, two
replicas and two ranks share a card: their times say what a change costs, not how fast two cards are. All rows of a
model train on the same batches from the same weights, so their losses must agree; but for dropout (bert), and for
BatchNorm, which sees half of the batch in two replicas or ranks. Two ranks on one GPU need NCCL 2.30 or newer: --nccl
libnccl.so.2. Without GPUs everything runs on the CPU, best with --tiny.
"""

import argparse
import itertools
import json
import os
import platform
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.training_rows import MARK, ROWS, WORKLOADS  # noqa: E402

LEAST_S = 20
"""No process is started with less time left."""
CHILD = str(ROOT / "benchmarks/training_rows.py")
KEY = ("commit", "hardware", "workload", "row")
Found = dict[str, Any]


class Source(NamedTuple):
    """A checkout."""

    folder: Path
    commit: str


def read_source(text: str) -> Source:
    """Read DIR or DIR=COMMIT; git is asked only where DIR itself is a checkout, not a folder in one."""
    name, _, commit = text.partition("=")
    folder = Path(name).resolve()
    if not (folder / "src/everygpu").is_dir():
        raise argparse.ArgumentTypeError(f"no src/everygpu in {folder}")
    if not commit and (folder / ".git").exists():
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not commit:
        raise argparse.ArgumentTypeError(f"git can't name the commit of {folder}: write {name}=COMMIT")
    return Source(folder, commit)


def existing(name: str) -> str:
    """Look for a file: the loader would leave a library out that isn't there."""
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"no file {name}")
    return str(Path(name).resolve())


class Results:
    """The file of rows, written after each."""

    def __init__(self, path: Path, resume: bool) -> None:
        if path.exists() and not resume:
            raise SystemExit(f"{path} is there already: --resume goes on with it")
        self.path, self.rows = path, read_rows(path) if path.exists() else []

    def find(self, key: Found) -> Found | None:
        return next((row for row in self.rows if all(row[k] == key[k] for k in KEY)), None)

    def add(self, key: Found, outcome: Found) -> Found:
        """Add a round to its row."""
        row = self.find(key)
        if row is None:
            self.rows.append(row := {**key, "rounds": 0, "windows_ms": []})
        row["rounds"] += 1
        windows = row["windows_ms"] + outcome.pop("windows_ms", [])
        row |= {"date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M UTC}", **outcome, "windows_ms": windows}
        if windows:
            row |= {"median_ms": statistics.median(windows), "least_ms": min(windows), "most_ms": max(windows)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text("[\n" + ",\n".join(json.dumps(row) for row in self.rows) + "\n]\n")
        partial.replace(self.path)
        return row


def read_rows(path: Path) -> list[Found]:
    rows: list[Found] = json.loads(path.read_text())
    return rows


def environment(source: Source, nccl: str | None, cards: int) -> dict[str, str]:
    """What a source's processes have: its package first, and leave to share a card."""
    paths = [str(source.folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    more |= {"EVERYGPU_SHARE_GPU": "1"} if cards == 1 else {}
    if nccl:
        shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
        more |= {"LD_PRELOAD": nccl, **shared}
    return {**os.environ, **more}


def run_job(job: Found, environ: dict[str, str], deadline: float) -> Iterator[Found]:
    """Yield rows as a process measures them; a row that ends it is an error, and another process does the others."""
    ranks = ROWS[job["rows"][0]].ranks
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    left = list(job["rows"])
    while left and deadline - time.monotonic() > LEAST_S:
        command = [sys.executable, *launch, CHILD, json.dumps({**job, "rows": left})]
        begun, process = None, None
        with tempfile.TemporaryFile("w+", errors="replace") as stderr:
            try:
                process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=stderr, text=True,
                                           start_new_session=True)  # fmt: skip
                for found in lines_of(process, deadline):
                    begun = found["row"]
                    if len(found) > 1 and begun in left:  # both ranks may say that they failed
                        left.remove(begun)
                        yield found
                process.wait(20)
            except (queue.Empty, subprocess.TimeoutExpired):
                pass
            finally:
                end(process)
            stderr.seek(0)
            reason = shorten(stderr.read()) or f"exit code {process.returncode}"
        if time.monotonic() >= deadline:
            return
        failed = list(left) if begun is None else left[: begun in left]
        for name in failed:
            left.remove(name)
            yield {"row": name, "error": reason}


def lines_of(process: "subprocess.Popen[str]", deadline: float) -> Iterator[Found]:
    """Yield what a process says until it ends. It ends itself at a row's limit, and says where it stood."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with process.stdout as stdout:  # type: ignore[union-attr]
            for line in stdout:
                lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while (line := lines.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
        if line.startswith(MARK):
            yield json.loads(line[len(MARK) :])
    reader.join()


def end(process: "subprocess.Popen[str] | None") -> None:
    """End a process if it hasn't; torchrun ends its ranks when it is asked to."""
    for number, patience in ((signal.SIGTERM, 40), (signal.SIGKILL, 10)):
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def shorten(text: str) -> str:
    """Take from what a process said why it ended: the error, or where it stood at its limit."""
    _, limit, after = text.partition("Timeout (")
    if limit:
        frames = [line.strip() for line in after.splitlines() if line.startswith("  File")]
        return f"no result in {after.partition(')')[0]}: {'; '.join(frames[:3])}"[:600]
    errors = re.findall(r"^(?:\[rank\d+\]: *)?((?!.*ChildFailed)[\w.]*(?:Error|Exception)\b.*)", text, re.MULTILINE)
    return (errors[-1] if errors else text.strip())[-600:]


def measure(options: argparse.Namespace) -> None:
    """Measure what is asked for and isn't in the file yet."""
    deadline = time.monotonic() + options.limit_s
    on_gpu = options.device != "cpu"
    hardware = torch.cuda.get_device_name(options.device) if on_gpu else f"CPU, {platform.machine()}"
    hardware = f"{options.cards} x {hardware}" if options.cards > 1 else hardware
    results = Results(options.out, options.resume)
    sizes = {"cards": options.cards, "window_s": options.window_s, "windows": options.windows}
    sizes["timeout_s"] = options.timeout
    for done, workload, ranks in itertools.product(range(options.rounds), options.workloads, (1, 2)):
        turn = options.source if done % 2 == 0 else options.source[::-1]
        for source in turn:
            keys = {n: {"commit": source.commit, "hardware": hardware, "workload": workload, "row": n,
                        "replicas": ROWS[n].replicas, "ranks": ranks}
                    for n in options.rows if ROWS[n].ranks == ranks and (on_gpu or not ROWS[n].needs_gpu)}  # fmt: skip
            if ranks > 1 and on_gpu and options.cards == 1 and not options.nccl:
                keys = {}
            names = [n for n, key in keys.items() if not is_done(results.find(key), done + 1)]
            if not names:
                continue
            job = {"workload": workload, "rows": names, "device": options.device, "tiny": options.tiny, **sizes}
            for outcome in run_job(job, environment(source, options.nccl, options.cards), deadline):
                print(describe(results.add(keys[outcome["row"]], outcome)), flush=True)
        if deadline - time.monotonic() < LEAST_S:
            print("the time is up: --resume goes on", flush=True)
            return


def is_done(row: Found | None, rounds: int) -> bool:
    return row is not None and ("error" in row or row["rounds"] >= rounds)


def describe(row: Found) -> str:
    head = f"{row['workload']:9} {row['row']:22} {row['commit']:14}"
    if "error" in row:
        return f"{head} {row['error']}"
    times = f"{row['median_ms']:9.3f} ms ({row['least_ms']:.3f} to {row['most_ms']:.3f}) x {row['steps']:<4}"
    losses = f"loss {row['first_loss']:.5f} to {row['last_loss']:.5f}"
    return f"{head} {times} {losses}  {row['peak_gib']:.2f} GiB  {row['note']}"


def compare(path: Path, before: str, after: str) -> None:
    """Print the rows of two commits side by side, for each card."""
    rows = read_rows(path)
    order = {(w, r): i for i, (w, r) in enumerate(itertools.product(WORKLOADS, ROWS))}
    for hardware in dict.fromkeys(row["hardware"] for row in rows):
        here = [row for row in rows if row["hardware"] == hardware]
        sides = [{(r["workload"], r["row"]): r for r in here if r["commit"].startswith(c)} for c in (before, after)]
        print(f"{hardware}\n{'':33}{'before ms':>12}{'after ms':>12}{'ratio':>8}")
        ratios = []
        for key in sorted(set(sides[0]) | set(sides[1]), key=order.__getitem__):
            pair = [side.get(key, {}) for side in sides]
            cells = "".join(f"{row['median_ms']:12.3f}" if "median_ms" in row else f"{'-':>12}" for row in pair)
            ratio, notes = (
                "",
                [f"{name}: {row['error']}" for name, row in zip(("before", "after"), pair) if "error" in row],
            )
            if all("median_ms" in row for row in pair):
                ratios.append(pair[1]["median_ms"] / pair[0]["median_ms"])
                ratio = f"{ratios[-1]:8.3f}"
                notes += differences(*pair)
            print(f"{key[0]:9} {key[1]:22} {cells}{ratio}  {'; '.join(notes)}".rstrip())
        if ratios:
            print(f"{'geometric mean':33}{statistics.geometric_mean(ratios):32.3f}")


def differences(before: Found, after: Found) -> list[str]:
    """Say what is not the same besides the time: the loss, the engine, the memory; or that ranges are apart."""
    found = []
    if before["least_ms"] > after["most_ms"] or after["least_ms"] > before["most_ms"]:
        found.append("apart")
    if abs(after["last_loss"] - before["last_loss"]) > 1e-3 * abs(before["last_loss"]):
        found.append(f"loss {before['last_loss']:.5f} -> {after['last_loss']:.5f}")
    if before["note"] != after["note"]:
        found.append(f"engine {before['note']} -> {after['note']}")
    if abs(after["peak_gib"] - before["peak_gib"]) > 0.02 * before["peak_gib"] + 0.01:
        found.append(f"GiB {before['peak_gib']:.2f} -> {after['peak_gib']:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    more = parser.add_argument
    more("--out", type=Path, default=ROOT / "benchmarks/results/rows.json", help="file of the rows")
    more("--source", type=read_source, action="append", metavar="DIR[=COMMIT]", help="checkout to measure; this one")
    more("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    more("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    more("--rounds", type=int, default=1, help="processes for each row")
    more("--windows", type=int, default=5, help="timed windows of each process")
    more("--window-s", type=float, default=0.3, help="seconds of a window, about")
    more("--timeout", type=float, default=90, help="seconds for a row; twice that where it compiles")
    more("--limit-s", type=float, default=86400, help="end before so many seconds have passed")
    more("--resume", action="store_true", help="go on with the file")
    more("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    more(
        "--nccl",
        type=existing,
        metavar="PATH",
        help="libnccl.so.2 for two ranks on one GPU; without it their rows are left out",
    )
    more("--cards", type=int, default=1, help="cards for two replicas and two ranks")
    more("--tiny", action="store_true", help="small models in float32, to see everything run")
    more("--compare", type=Path, metavar="FILE")
    more("--before", metavar="COMMIT")
    more("--after", metavar="COMMIT")
    options = parser.parse_args()
    if options.compare:
        if not (options.before and options.after):
            parser.error("--compare needs --before and --after")
        compare(options.compare, options.before, options.after)
        return
    options.source = options.source or [read_source(str(ROOT))]
    measure(options)


if __name__ == "__main__":
    main()
