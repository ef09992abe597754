"""Run programs alone: ``python -m tests.parallel.programs 17 --setup threads``."""

import argparse
import sys

from tests.parallel.programs.run import SETUPS, check_seeds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parallel.programs", description="Run a random program.")
    parser.add_argument("seed", type=int)
    parser.add_argument("last", type=int, nargs="?", help="run all seeds up to this one")
    parser.add_argument("--setup", choices=SETUPS, default="threads")
    args = parser.parse_args()
    seeds = range(args.seed, 1 + (args.seed if args.last is None else args.last))
    if len(seeds) == 1:
        print(SETUPS[args.setup].draw(args.seed).describe())
    reports, num_graphs = check_seeds(args.setup, seeds)
    print(*reports, f"{len(reports)} of {len(seeds)} failed; {num_graphs} captures", sep="\n")
    sys.exit(bool(reports))


if __name__ == "__main__":
    main()
