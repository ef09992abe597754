"""Put the same faults on everygpu, torch.save, torch.distributed.checkpoint and safetensors, side by side.

    python -m benchmarks.faults                    # prints the tables that docs/reliability.md shows
    python -m benchmarks.faults --kills 50         # quicker
    python -m benchmarks.faults --interrupts 200   # longer

The second table is of savers that work beside the training: interrupted, at the program's end, and killed. Runs on
the CPU, in a temporary directory. Ends with status 1 if everygpu loses a checkpoint or takes a damaged one for whole.
"""

import argparse
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.exits import exits_table
from tests.faults.inject import (
    count_unnoticed,
    files_of,
    flip_bit,
    full_at,
    kill_randomly,
    truncate,
    what_is_there,
)
from tests.faults.savers import (
    EVERYGPU,
    SAFETENSORS,
    TORCH,
    Saver,
    Weights,
    distributed_checkpoint,
)

from everygpu.bench.report import describe_machine

NUM_TRUNCATIONS, NUM_FLIPS = 100, 200


class Poison:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def count_losses_to_kills(saver: Saver, root: Path, num_kills: int) -> str:
    """Kill -9 while an existing checkpoint is overwritten: how often neither the old nor the new one loads."""
    outcome = kill_randomly(saver, root, num_kills)
    return f"{outcome['lost']} of {num_kills} lost"


def count_losses_to_full_disks(saver: Saver, root: Path) -> str:
    """Let writing fail after some number of bytes: how often the old checkpoint is gone."""
    saver.save(root / "ckpt", Weights(1))
    biggest = max(path.stat().st_size for path in files_of(root / "ckpt"))
    limits = range(0, biggest, max(1, biggest // 50))
    lost = 0
    for limit in limits:
        saver.save(root / "ckpt", Weights(1))
        full_at(saver, root, limit, Weights(2))
        lost += what_is_there(saver, root / "ckpt", old=1) == "lost"
    return f"{lost} of {len(limits)} lost"


def unnoticed_truncations(saver: Saver, root: Path) -> str:
    return f"{count_unnoticed(saver, root, NUM_TRUNCATIONS, truncate)} of {NUM_TRUNCATIONS} load"


def unnoticed_flips(saver: Saver, root: Path) -> str:
    return f"{count_unnoticed(saver, root, NUM_FLIPS, flip_bit)} of {NUM_FLIPS} load"


def is_poison_executed(saver: Saver, root: Path) -> str:
    """Put a pickle that runs code in the place of each file in turn, and load."""
    saver.save(root / "ckpt", Weights(1))
    executed = 0
    files = files_of(root / "ckpt")
    for index, path in enumerate(files):
        original, marker = path.read_bytes(), root / f"marker{index}"
        with open(path, "wb") as file:
            torch.save(Poison(marker), file)
        what_is_there(saver, root / "ckpt", old=1)
        path.write_bytes(pickle.dumps(Poison(marker)))
        what_is_there(saver, root / "ckpt", old=1)
        executed += marker.exists()
        path.write_bytes(original)
    return f"in {executed} of {len(files)} files" if executed else "no"


def mode_under_umask(saver: Saver, root: Path) -> str:
    before = os.umask(0o002)
    try:
        saver.save(root / "ckpt", Weights(1))
    finally:
        os.umask(before)
    return ", ".join(sorted({f"{path.stat().st_mode & 0o777:04o}" for path in files_of(root / "ckpt")}))


def is_link_kept(saver: Saver, root: Path) -> str:
    (root / "disk").mkdir()
    (root / "ckpt").symlink_to("disk/real")
    try:
        saver.save(root / "ckpt", Weights(1))
        saver.save(root / "ckpt", Weights(2))
    except (OSError, RuntimeError):
        return "refused"
    return "kept" if (root / "ckpt").is_symlink() and (root / "disk" / "real").exists() else "replaced"


def make_table(savers: list[Saver], num_kills: int) -> str:
    """Run every fault on every saver; return a Markdown table."""
    rows: dict[str, Callable[[Saver, Path], str]] = {
        "kill -9 while overwriting": lambda saver, root: count_losses_to_kills(saver, root, num_kills),
        "disk full while overwriting": count_losses_to_full_disks,
        "a file cut off": unnoticed_truncations,
        "one bit flipped": unnoticed_flips,
        "a pickle in a file's place is executed": is_poison_executed,
        "mode of the files under umask 002": mode_under_umask,
        "a symbolic link to the checkpoint": is_link_kept,
    }
    lines = ["| fault | " + " | ".join(saver.name for saver in savers) + " |", "|---" * (len(savers) + 1) + "|"]
    for title, fault in rows.items():
        cells = []
        for saver in savers:
            with tempfile.TemporaryDirectory() as root:
                cells.append(fault(saver, Path(root)))
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def count_own_losses(lines: list[str]) -> int:
    """Count the rows of tables whose first cell, everygpu's, tells of losses."""
    cells = [line.split("|")[2].strip() for line in lines if line.startswith("|")]
    return sum(" of " in cell and not cell.startswith("0 of ") for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--interrupts", type=int, default=20, help="for each handler and each number to keep")
    parser.add_argument("--exits", type=int, default=40, help="for each kind of end")
    parser.add_argument("--kills-with-workers", type=int, default=20)
    options = parser.parse_args()
    lines = []
    if options.kills:
        lines += make_table([EVERYGPU, TORCH, distributed_checkpoint(), SAFETENSORS], options.kills).splitlines()
        print("\n".join(lines) + "\n", flush=True)
    for line in exits_table(options.interrupts, options.exits, options.kills_with_workers):
        lines.append(line)
        print(line, flush=True)
    print("\n" + ", ".join(f"{name} {value}" for name, value in describe_machine().items() if value))
    return int(count_own_losses(lines) > 0)


if __name__ == "__main__":
    sys.exit(main())
