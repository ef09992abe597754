"""Copy known bytes between every two GPUs, in a process that may be killed: see ``p2p``.

    python -m everygpu.devices.peer_test NUM_DEVICES [SECONDS]

Writes a line of JSON before each pair and at the end: what is known so far, and what comes now. What takes longer than
the limit ends the process, which the reader sees by ``faulthandler``'s words.
"""

import faulthandler
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

Transfer = Callable[[Tensor, Tensor], None]
"""Copies the second tensor, on one device, into the first, on another."""

_NUM_BYTES = (4_104, 2_097_152)  # a few pages and a bit, and the size of a bucket
_UNWRITTEN = 0xA5
# A copy of memory as it lies is the copy engine's; of a transposed matrix, a kernel's, which reads the other
# GPU's memory itself.
_WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "the copy engine": lambda x: x,
    "a kernel": lambda x: x.view(torch.bfloat16).view(-1, 4).t(),
}


def copy(target: Tensor, source: Tensor) -> None:
    """Copy as all of everygpu does between GPUs it trusts."""
    target.copy_(source, non_blocking=True)


def main(arguments: Sequence[str], devices: Sequence[torch.device] | None = None, transfer: Transfer = copy) -> None:
    """Test every ordered pair of devices, or of the first CUDA devices, and write what comes of it."""
    limit_s = float(arguments[1]) if len(arguments) > 1 else None
    used = devices or [torch.device("cuda", index) for index in range(int(arguments[0]))]
    patterns = {i: pattern for i, device in enumerate(used) if (pattern := _try_pattern(device)) is not None}
    pairs: list[list[Any]] = []
    state: dict[str, Any] = {"ready": list(patterns), "pairs": pairs}

    def say(now: Any = None) -> None:
        """Write what is known; from now on ``now`` has its limit."""
        sys.stdout.write(json.dumps({**state, "now": now}) + "\n")
        sys.stdout.flush()
        faulthandler.cancel_dump_traceback_later()
        if limit_s is not None and now is not None:
            # A thread in C ends the process, whatever the interpreter waits for.
            faulthandler.dump_traceback_later(limit_s, exit=True, file=1)

    for source, target in itertools.permutations(patterns, 2):
        say(now=[source, target])
        with suppress(torch.OutOfMemoryError):  # others fill the GPU: nothing is known of the pair
            pairs.append([source, target, find_wrong(patterns[source], patterns[target], source, transfer)])
    say()


def _try_pattern(device: torch.device) -> Tensor | None:
    """Make the pattern on a device, through host memory; None if there is no memory for a context."""
    try:
        pattern = make_pattern()
        there = pattern.to(device)
        # With itself: that loads all kernels, whose time is no copy's.
        is_sound = torch.equal(there.cpu(), pattern) and find_wrong(there, there, 1, copy) is None
    except RuntimeError:
        return None
    return there if is_sound else None


def make_pattern() -> Tensor:
    """Make bytes that name their place, shape (num_bytes,), uint8, on the CPU: every value, NaNs of all sorts."""
    place = torch.arange(max(_NUM_BYTES), dtype=torch.int64)
    return (place * 37 + (place >> 8) * 11 + (place >> 16) * 3).to(torch.uint8)


def find_wrong(source: Tensor, target: Tensor, mark: int, transfer: Transfer) -> str | None:
    """Copy the pattern, raised by a number of the source, in every way, and say what arrives wrong."""
    sent, expected = source + mark, target + mark
    for num_bytes, (way, lay_out) in itertools.product(_NUM_BYTES, _WAYS.items()):
        there, wanted = lay_out(sent[:num_bytes]), lay_out(expected[:num_bytes])
        arrived = torch.full((num_bytes,), _UNWRITTEN, dtype=torch.uint8, device=target.device)
        arrived = arrived.view(there.dtype).view(there.shape)
        _wait_for(source.device, target.device)
        transfer(arrived, there)
        _wait_for(source.device, target.device)
        if not torch.equal(arrived.view(torch.uint8), wanted.contiguous().view(torch.uint8)):
            return f"{num_bytes} bytes by {way}"
    return None


def _wait_for(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # to give CUDA back may hang as well
