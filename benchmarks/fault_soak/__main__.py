"""Faults at random moments of the digits example: what is whole, what is left, and whether resumed runs are the same.

    python -m benchmarks.fault_soak                                    # 1,000 faults
    python -m benchmarks.fault_soak --faults 100 --peers torch,dcp,lightning
    python -m benchmarks.fault_soak --seed 7 --only "kill -9 of a worker"

Runs on the CPU. benchmarks/soak.py is another one: long runs without faults, on GPUs. Ends with status 1 if
everygpu loses or damages a checkpoint, resumes with other numbers, leaves something behind, or hangs.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.fault_soak.checks import Record
from benchmarks.fault_soak.driver import Driver
from benchmarks.fault_soak.fork_server import start_server
from benchmarks.fault_soak.processes import Starter, put_back_mounts, use_private_mounts
from benchmarks.fault_soak.run import prepare
from benchmarks.fault_soak.setup import Setup
from benchmarks.fault_soak.tables import Runs, compare, make_table
from benchmarks.fault_soak.ways import WAYS

from everygpu.bench.report import describe_machine


def as_json(record: Record) -> dict[str, Any]:
    return {
        "way": record.setup.name,
        "loop": record.setup.loop,
        "code": record.code,
        "raised": record.raised,
        "seconds": round(record.seconds, 3),
        "faults": [fault.as_json() for fault in record.faults],
        "wrong": record.wrong,
        "said": record.said.read_text()[-3000:] if record.wrong else "",
    }


def say(number: int, records: Sequence[Record]) -> None:
    """Say what was wrong in a training, and when another hundred faults are done."""
    if number // 100 > (number - sum(len(record.faults) for record in records)) // 100:
        print(f"{number} faults", flush=True)
    for record in records:
        for name, what in record.wrong:
            print(f"{number}: {record.setup} run {record.number}: {name}: {what}; {record.faults}", flush=True)


def take_note(path: Path | None, before: Runs, driver: Driver, number: int, records: Sequence[Record]) -> None:
    """Say what was wrong in a training; write what there is so far, should the rest never come."""
    say(number, records)
    write(path, [*before, *map(as_json, driver.records)])


def write(path: Path | None, runs: Runs) -> None:
    if path is not None:
        path.write_text(json.dumps(runs, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000, help="for each engine and peer")
    parser.add_argument("--engines", default="threads")
    parser.add_argument("--peers", default="", help=", ".join(way for way in WAYS if way != "everygpu"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds of faults, separated by commas")
    parser.add_argument("--plan", help='these faults of one training, as "kill -9@7,SIGTERM@9", in place of drawn ones')
    parser.add_argument("--setup", default="{}", help="of that training, as JSON")
    parser.add_argument("--quick", action="store_true", help="runs end before modules do, orphaned workers soon")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="*", help="only compare what --json wrote to these files")
    options = parser.parse_args()
    if options.read:
        print(compare([run for path in options.read for run in json.loads(path.read_text())]))
        return 0
    torch.set_num_threads(1)
    tries = [("everygpu", engine) for engine in options.engines.split(",") if engine]
    tries += [(peer, "") for peer in options.peers.split(",") if peer and WAYS[peer].is_there()]
    folder = Path(tempfile.mkdtemp())
    disk = folder / "disk"
    disk.mkdir()
    has_mounts = use_private_mounts(disk)
    server = start_server(lambda: prepare([way for way, _ in tries], 0.2 if options.quick else 5.0))
    if server is None:  # this was a run
        return 0
    print(f"a small disk and a /dev/shm of its own: {has_mounts}", flush=True)
    try:
        return put_faults(options, tries, Starter(server), disk)
    finally:
        server.close()
        put_back_mounts(disk)
        shutil.rmtree(folder)


def put_faults(options: argparse.Namespace, tries: list[tuple[str, str]], starter: Starter, disk: Path) -> int:
    """Put faults on each way, and print the tables; return the exit status."""
    runs: list[dict[str, Any]] = []
    for way, engine in tries:
        begin = time.monotonic()
        driver = Driver(starter, disk, options.seed, is_quick=options.quick)
        report = partial(take_note, options.json, tuple(runs), driver)
        if options.plan:
            driver.put_plan(Setup(way=way, engine=engine, **json.loads(options.setup)), options.plan, report)
        else:
            driver.put(way, engine, options.faults, report, tuple(filter(None, options.only.split(","))))
        found = [as_json(record) for record in driver.records]
        print(make_table(found[0]["way"], found), f"\n\n{time.monotonic() - begin:.0f} s\n", sep="", flush=True)
        runs += found
        write(options.json, runs)
    print(compare(runs) + "\n")
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items() if value), f"seed {options.seed}")
    return int(any(run["wrong"] for run in runs if run["way"].startswith("everygpu")))


if __name__ == "__main__":
    sys.exit(main())
