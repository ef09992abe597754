"""``everygpu run --restarts``: start a run again after an end that another try may get past."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from everygpu.child import python_command
from everygpu.devices import nvml
from everygpu.exit_codes import BAD_NUMBERS, INTERRUPTED, STOPPED, STUCK

_CRASHES = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
_PASSED_ON = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
_CODES = {BAD_NUMBERS: "its numbers are not finite, or its replicas differ", STUCK: "the watchdog ended it"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is started: ``everygpu run`` again, without restarts of its own."""

    options: Sequence[str]
    """As the user has written them."""
    script: Sequence[str]
    """And what follows it."""
    indices: Sequence[int] = ()
    """The GPUs that ``--gpus`` names."""
    count: int | None = None
    """How many it asks for."""
    start: Callable[[list[str]], "subprocess.Popen[bytes]"] = field(default=subprocess.Popen, compare=False)

    def arguments(self, lost: Mapping[str, int]) -> list[str]:
        """Write the command line, whose last options count.

        Args:
            lost: GPUs to do without: their UUIDs and indices.
        """
        options = [*self.options, "--restarts", "0"]
        left = [str(index) for index in self.indices if index not in lost.values()]
        if lost and left:
            options += ["--gpus", ",".join(left) + ","]
        if lost and self.count is not None:
            options += ["--min-count", "1"]
        return python_command("everygpu", "run", *options, *self.script)


def run_again(command: Command, num_restarts: int, tell: Callable[[str], None]) -> int:
    """Run a command to an end that is none of these: exit codes 5 and 6, a crash or a kill, a lost GPU.

    Args:
        command: Finds the newest checkpoint by itself.
        num_restarts: How often it is started again at most.
        tell: Called with a line for the user before each.
    Returns:
        Its last exit code; 128 and the signal that killed it.
    """
    lost: dict[str, int] = {}
    for restart in range(1, num_restarts + 2):
        before = _gpus()
        code, is_asked = _run(command.arguments(lost), command.start)
        after = _gpus() if code else before
        gone = {uuid: index for uuid, index in before.items() if uuid not in after}
        lost |= gone
        reason = None if is_asked or (gone and not after) else reason_of(code, gone)
        if reason is None:
            break
        if restart > num_restarts:
            tell(f"{reason}: not started again, {num_restarts} restart(s) are used up.")
            break
        tell(f"{reason}: started again from its newest checkpoint, restart {restart} of {num_restarts}.")
    return code


def reason_of(code: int, lost: Mapping[str, int]) -> str | None:
    """Say why a run is started again; None where it isn't.

    Args:
        code: Its exit code; 128 and the signal where one killed it.
        lost: GPUs that have answered at its start, and don't now.
    """
    if code in (0, STOPPED, INTERRUPTED):
        return None
    if lost:
        return f"exit code {code}, GPU {', '.join(map(str, sorted(lost.values())))} is lost"
    killed = next((name for name in _CRASHES if code == 128 + getattr(signal, name, 0)), None)
    if killed is not None:
        return f"killed by {killed}"
    return f"exit code {code}, {_CODES[code]}" if code in _CODES else None


def _run(arguments: list[str], start: Callable[[list[str]], "subprocess.Popen[bytes]"]) -> tuple[int, bool]:
    """Wait for a process; return its exit code, and whether a signal has asked for its end."""
    asked: list[int] = []
    with _handling(asked.append):
        process = start(arguments)
        with _handling(lambda number: _pass_on(process, number, asked)):
            for number in tuple(asked):  # while it was started
                process.send_signal(number)
            code = process.wait()
    return code if code >= 0 else 128 - code, bool(asked)


def _pass_on(process: "subprocess.Popen[bytes]", number: int, asked: list[int]) -> None:
    asked.append(number)
    if not (number == signal.SIGINT and _is_in_terminal()):  # which sends it to both
        process.send_signal(number)


def _is_in_terminal() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


@contextmanager
def _handling(handle: Callable[[int], object]) -> Iterator[None]:
    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    numbers = [getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)]
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _gpus() -> dict[str, int]:
    return {gpu.uuid: gpu.index for gpu in nvml.sample_devices() or []}
