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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FILE_LIMIT_S = 400
STAGES = {"together": "gpu and not alone", "alone": "gpu and alone"}


@dataclass(kw_only=True)
class Outcome:
    """What became of the tests of one file in one stage."""

    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    """How many, by their reason."""
    failed: list[str] = field(default_factory=list)

    def line(self, file: str) -> str:
        parts = [f"{n} {name}" for name, n in self.counts.items() if n]
        reasons = [f"{n} x {reason}" for reason, n in self.skipped.items()]
        text = f"{file}: {', '.join(parts) or 'nothing ran'} in {self.seconds:.0f} s"
        return text + (f" ({'; '.join(reasons)})" if reasons else "")


def find_files(stage: str, paths: Sequence[str]) -> list[str]:
    """List the files with tests of a stage, those with the most tests first."""
    asked = [*python_pytest(STAGES[stage]), "--collect-only", "-q", *paths]
    text = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    rows = [line.rsplit(": ", 1) for line in text.splitlines() if ".py: " in line]
    return [file for file, _ in sorted(rows, key=lambda row: -int(row[1]))]


def python_pytest(marks: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks]


def run_file(file: str, stage: str, limit_s: float) -> Outcome | None:
    """Run the tests of one file; None where the limit comes first."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*python_pytest(STAGES[stage]), "--tb=short", "--show-capture=log", f"--junitxml={report}", file]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=min(limit_s, FILE_LIMIT_S), check=False
            )
            text = done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            if limit_s < FILE_LIMIT_S:
                return None
            text = f"no end within {FILE_LIMIT_S} s\n" + (error.stdout or b"").decode()
        outcome = read_report(report) if report.exists() else Outcome(counts={"failed": 1}, failed=["the process"])
    outcome.seconds = time.monotonic() - start
    if outcome.failed:
        print(text[-2500:], flush=True)
    return outcome


def read_report(report: Path) -> Outcome:
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag: child for child in case}
        if "failure" in kinds or "error" in kinds:
            counts["failed"] += 1
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            counts["skipped"] += 1
            skipped[kinds["skipped"].get("message") or ""] += 1
        else:
            counts["passed"] += 1
    return Outcome(counts=dict(counts), skipped=dict(skipped), failed=failed)


class Suite:
    """The state of a run, kept in a file after each file of tests."""

    def __init__(self, state: Path, paths: Sequence[str]) -> None:
        self._state = state
        if state.exists():
            kept = json.loads(state.read_text())
            self._files, done = kept["files"], kept["done"]
        else:
            self._files, done = {stage: find_files(stage, paths) for stage in STAGES}, {}
        self.done = {key: Outcome(**outcome) for key, outcome in done.items()}

    def left(self, stage: str) -> Iterator[str]:
        return (file for file in self._files[stage] if f"{file} {stage}" not in self.done)

    def keep(self, file: str, stage: str, outcome: Outcome) -> None:
        self.done[f"{file} {stage}"] = outcome
        kept = {"files": self._files, "done": {key: asdict(o) for key, o in self.done.items()}}
        self._state.parent.mkdir(parents=True, exist_ok=True)
        self._state.write_text(json.dumps(kept, indent=1))
        print(outcome.line(file if stage == "together" else f"{file} ({stage})"), flush=True)

    def run(self, stage: str, num_workers: int, deadline: float) -> None:
        def run_one(file: str) -> None:
            left = deadline - time.monotonic()
            outcome = run_file(file, stage, left) if left > 5 else None
            if outcome is not None:
                self.keep(file, stage, outcome)

        with ThreadPoolExecutor(num_workers) as pool:
            list(pool.map(run_one, list(self.left(stage))))

    def summary(self) -> int:
        counts: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for outcome in self.done.values():
            counts.update(outcome.counts)
            reasons.update(outcome.skipped)
        for key, outcome in self.done.items():
            for name in outcome.failed:
                print(f"failed: {key}: {name}")
        for reason, n in reasons.most_common():
            print(f"skipped: {n} x {reason}")
        num_left = sum(len(list(self.left(stage))) for stage in STAGES)
        print(
            f"{counts['passed']} passed, {counts['skipped']} skipped, {counts['failed']} failed; {num_left} files left"
        )
        return 1 if counts["failed"] else 2 if num_left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files and folders of tests; all if left out")
    parser.add_argument("--limit-s", type=float, default=560)
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "gpu_suite.json")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    suite = Suite(options.state, options.paths)
    suite.run("together", options.workers, deadline)
    if not any(suite.left("together")):
        suite.run("alone", 1, deadline)
    return suite.summary()


if __name__ == "__main__":
    sys.exit(main())
