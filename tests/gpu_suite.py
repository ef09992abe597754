"""Run the tests that are marked ``gpu``, a process a file, in calls that go on where the one before stopped.

python -m tests.gpu_suite [--limit-s 560] [--workers 6] [--state build/gpu_suite.json] [FILES...]

What is marked ``alone`` runs last, by itself. Exit code 0: all files are done, and nothing failed; 1: something failed;
2: the limit came first, call it again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FILE_LIMIT_S = 400
STAGES = {"together": "gpu and not alone", "alone": "gpu and alone"}
KINDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def pytest_command(stage, *options):
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", STAGES[stage], *options]


def find_files(stage, paths):
    """List the files with tests of a stage, those with the most tests first."""
    asked = pytest_command(stage, "--collect-only", "-q", *paths)
    text = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    rows = [line.rsplit(": ", 1) for line in text.splitlines() if ".py: " in line]
    return [file for file, _ in sorted(rows, key=lambda row: -int(row[1]))]


def run_file(file, stage, limit_s):
    """Run the tests of one file; return how each ended, or None where the limit comes first."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = pytest_command(stage, "--tb=short", "--show-capture=log", f"--junitxml={report}", file)
        try:
            limit = min(limit_s, FILE_LIMIT_S)
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
            text = done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            if limit_s < FILE_LIMIT_S:
                return None
            text = f"no end within {FILE_LIMIT_S} s\n" + (error.stdout or b"").decode()
        tests = list(read_report(report)) if report.exists() else [("failed", "the process")]
    if any(kind == "failed" for kind, _ in tests):
        print(text[-2500:], flush=True)
    return tests


def read_report(report):
    """Give for each test how it ended, with its name or why it was skipped."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found = next((child for child in case if child.tag in KINDS), None)
        kind = "passed" if found is None else KINDS[found.tag]
        yield kind, found.get("message") if kind == "skipped" else f"{case.get('classname')}::{case.get('name')}"


def line(title, tests):
    """Say how many ended how, and why some were skipped."""
    kinds, reasons = Counter(kind for kind, _ in tests), Counter(what for kind, what in tests if kind == "skipped")
    counts = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "nothing ran"
    return f"{title}: {counts}" + "".join(f"; {n} x {reason}" for reason, n in reasons.most_common())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files and folders of tests; all if left out")
    parser.add_argument("--limit-s", type=float, default=560)
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "gpu_suite.json")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.state.exists():
        state = json.loads(options.state.read_text())
    else:
        state = {"files": {stage: find_files(stage, options.paths) for stage in STAGES}, "done": {}}

    one_at_a_time = threading.Lock()

    def left(stage):
        return [file for file in state["files"][stage] if f"{file} {stage}" not in state["done"]]

    def run_one(stage, file):
        remaining, start = deadline - time.monotonic(), time.monotonic()
        tests = run_file(file, stage, remaining) if remaining > 5 else None
        if tests is None:
            return
        with one_at_a_time:
            state["done"][f"{file} {stage}"] = tests
            options.state.parent.mkdir(parents=True, exist_ok=True)
            options.state.write_text(json.dumps(state, indent=1))
            print(line(f"{file} ({stage}, {time.monotonic() - start:.0f} s)", tests), flush=True)

    for stage, num_workers in (("together", options.workers), ("alone", 1)):
        if stage == "together" or not left("together"):
            with ThreadPoolExecutor(num_workers) as pool:
                list(pool.map(lambda file, stage=stage: run_one(stage, file), left(stage)))
    everything = [test for tests in state["done"].values() for test in tests]
    failed, num_left = [what for kind, what in everything if kind == "failed"], sum(len(left(s)) for s in STAGES)
    print(*(f"failed: {name}" for name in failed), line("in all", everything), f"{num_left} files left", sep="\n")
    return 1 if failed else 2 if num_left else 0


if __name__ == "__main__":
    sys.exit(main())
