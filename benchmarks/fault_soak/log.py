"""What a run has told, line by line."""

import json
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fault_soak.kinds import Fault, kinds


@dataclass(slots=True, kw_only=True)
class Log:
    """What a run has told."""

    losses: dict[int, str] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """Lines that differ from another run's of the same step."""
    done: list[Fault] = field(default_factory=list)
    resumed: list[tuple[int, str]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    """Steps at which a save has begun."""
    returned: list[int] = field(default_factory=list)
    """Those that have returned."""
    caught: list[str] = field(default_factory=list)
    raised: str | None = None
    message: str = ""
    between: list[tuple[int, int, int, list[str]]] = field(default_factory=list)
    forks: dict[int, int] = field(default_factory=dict)
    last_step: int = 0
    has_finished: bool = False

    def announced(self, *, asynchronous: bool, is_orderly: bool) -> int:
        """Return the last step whose checkpoint must be there."""
        sure = self.returned if is_orderly or not asynchronous else self.returned[:-1]
        return max(sure, default=0)

    @property
    def was_full(self) -> bool:
        """Whether saves may have failed: the disk was full, or no more files could be opened."""
        return any({"fills", "files"} & kinds()[fault.kind].options.keys() for fault in self.done)

    def take_in(self, line: str, plan: list[Fault]) -> tuple[Fault, dict[str, Any]] | None:
        """Take note of a line; return the fault that it tells of, with the processes that there are."""
        word, *rest = line.split(" ")
        if word == "resumed":
            self._resume(int(rest[0]), rest[1])
        elif word == "step":
            self._take_step(int(rest[0]), *rest[1:])
        elif word == "saves":
            self.begun.append(int(rest[0]))
        elif word == "not":  # due
            self.begun.pop()
        elif word == "returned":
            self.returned.append(int(rest[0]))
        elif word == "caught":
            self.caught.append(rest[0])
        elif word == "raised":
            self.raised, self.message = rest[0], " ".join(rest[1:])
        elif word == "between":
            self.between.append((*map(int, rest[:3]), rest[3:]))
        elif word == "fork":
            self.forks[int(rest[0])] = int(rest[1])
        elif word == "saved":
            self.has_finished = True
        elif word == "fault":
            self.done.append(next(fault for fault in plan if fault.number == int(rest[0])))
            return self.done[-1], json.loads(" ".join(rest[1:]))
        return None

    def _resume(self, step: int, digest: str) -> None:
        """Take note of a load; one that isn't the first comes after an error that the script has caught."""
        done = max(self.returned, default=self.resumed[0][0] if self.resumed else 0)
        begun = max([done, *self.begun])  # an interrupt may come when it is written, and the call has not returned
        if self.resumed and not self.was_full and not done <= step <= begun:
            self.wrong.append(("wrong step", f"went back to {step}, where {self.returned} were saved"))
        self.resumed.append((step, digest))

    def _take_step(self, step: int, loss: str, digest: str) -> None:
        self.last_step = step
        if self.losses.setdefault(step, loss) != loss:
            self.wrong.append(("different losses", f"step {step} twice"))
        self.digests[step] = digest
