"""Read checkpoints whose files are spoiled in every way their formats allow, and look for what goes wrong.

    python -m benchmarks.fuzz_readers --cases 2000               # of each reader; some minutes
    python -m benchmarks.fuzz_readers --readers torch --seed 7

Each case is read by load, by what convert and diff use, and by verify. They may read it, or raise an error of ours with
a message of at most 1000 letters. A finding is anything else: another exception, a crash, 5 s for the three, 256 MiB
more of the largest resident set, or memory refused at a data limit 4 GiB above the process. Prints JSON; ends with
status 1 where there is a finding. Linux only.
"""

import argparse
import json
import sys
import time

from tests.faults.fuzz import fuzz
from tests.faults.spoil import READERS

from everygpu.bench.report import describe_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", nargs="+", choices=READERS, default=list(READERS))
    options = parser.parse_args()
    print(json.dumps({"machine": describe_machine(), "seed": options.seed}), flush=True)
    num_findings = 0
    for reader in options.readers:
        begin = time.perf_counter()
        outcome = fuzz(reader, options.cases, options.seed)
        num_findings += len(outcome.findings)
        row = {
            "reader": reader,
            "cases": outcome.num_cases,
            "results": dict(outcome.results.most_common()),
            "findings": outcome.findings,
            "peak_mib": round(outcome.peak_bytes / 2**20, 1),
            "longest_s": round(outcome.longest_s, 2),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        print(json.dumps(row), flush=True)
    sys.exit(1 if num_findings else 0)


if __name__ == "__main__":
    main()
