"""The faults: what they do, where they come, and how a run may end after them."""

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fault_soak.task import LAST_STEP, NUM_REPLICAS
from tests.faults.inject import flip_bit, truncate

PHASES = ("data", "forward", "backward", "update", "save")
END = "end"
"""After the last step: a save may still be on, and the interpreter ends."""
FIRST_STEP, LAST_FAULT = 2, LAST_STEP - 8
"""Data is fetched so many batches ahead that what its loader is told later may not come."""
LONGEST_GAP = 9

KILL, STOP, CONT, INT, TERM, USR1 = (
    getattr(signal, f"SIG{name}") for name in ("KILL", "STOP", "CONT", "INT", "TERM", "USR1")
)
GOES_ON = "goes on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault."""

    name: str
    ends: tuple[str | int, ...]
    """How the run may end: by an exit code or a negative signal, by an exception, or it goes on."""
    errors: tuple[str, ...] = ()
    """The exceptions it may raise."""
    target: str = "main"
    """The process that gets the signals: the main one, or a worker of the loader; or all of them."""
    signals: tuple[tuple[float, int], ...] = ()
    """Seconds since the one before, at most, and the number."""
    phases: tuple[str, ...] = PHASES
    weight: float = 1.0
    damage: Callable[[Path, random.Random], None] | None = None
    """What is done to a file of the newest checkpoint after the run's end."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of what the run does to itself."""

    def is_right(self, code: int, raised: str | None, way: str) -> bool:
        """Tell whether a run may end so, or have raised this and gone on.

        Peers have no handlers of signals, and end with whatever exception they like.
        """
        if way != "everygpu" and (raised is not None or code in {-number for _, number in self.signals}):
            return True
        if raised is not None and raised != "KeyboardInterrupt" and raised != "SystemExit":
            return raised in self.errors
        return code in self.ends


_WORKER = ("WorkerError", "RuntimeError")
_FULL = ("CheckpointError", "RuntimeError", "CheckpointException", "OSError")
# A worker that can't send its batch drops it, and only prints why (torch's queue); the Feeder's timeout says the rest.
_NO_FILES = (*_FULL, "WorkerError", "EOFError", "ConnectionResetError", "FeedTimeoutError")


def _kinds() -> tuple[Kind, ...]:
    soon = 0.012
    pause = ((soon, STOP), (0.3, CONT))
    return (
        Kind(name="kill -9", ends=(-KILL,), signals=((soon, KILL),), weight=2),
        Kind(name="kill -9 in a save", ends=(-KILL,), signals=((0.008, KILL),), phases=("save",),
             options={"dies": 60}, weight=3),
        Kind(name="kill -9 of a worker", ends=(GOES_ON,), errors=_WORKER, target="worker", signals=((soon, KILL),)),
        Kind(name="main stopped and continued", ends=(GOES_ON,), signals=pause),
        Kind(name="worker stopped and continued", ends=(GOES_ON,), target="worker", signals=pause),
        Kind(name="worker stopped for good", ends=(GOES_ON,), errors=("FeedTimeoutError", *_WORKER), target="worker",
             signals=((soon, STOP),), weight=0.5),
        Kind(name="SIGTERM", ends=(143,), signals=((soon, TERM),)),
        Kind(name="SIGUSR1", ends=(143,), signals=((soon, USR1),)),
        Kind(name="SIGTERM to all processes", ends=(143,), errors=("WorkerError",), target="all",
             signals=((soon, TERM),)),
        Kind(name="Ctrl-C", ends=(-INT,), signals=((soon, INT),)),
        Kind(name="Ctrl-C as in a notebook", ends=(-INT,), errors=("KeyboardInterrupt",), signals=((soon, INT),),
             options={"caught": True}),
        Kind(name="Ctrl-C twice", ends=(-INT,), signals=((soon, INT), (0.4, INT))),
        Kind(name="exception in forward", ends=(), errors=("ValueError",), phases=("forward",),
             options={"fails": "forward", "error": "value"}),
        Kind(name="exception in backward", ends=(), errors=("ValueError",), phases=("forward",),
             options={"fails": "backward", "error": "value"}),
        Kind(name="exception in a worker", ends=(GOES_ON,), errors=("ValueError",), phases=("data",),
             options={"tells": "value"}),
        Kind(name="out of memory in forward", ends=(), errors=("OutOfMemoryError",), phases=("forward",),
             options={"fails": "forward", "error": "memory"}),
        Kind(name="out of memory in backward", ends=(), errors=("OutOfMemoryError",), phases=("forward",),
             options={"fails": "backward", "error": "memory"}),
        Kind(name="full disk", ends=(GOES_ON,), errors=_FULL, phases=("save",), options={"fills": 700_000}, weight=2),
        Kind(name="too many open files", ends=(GOES_ON,), errors=_NO_FILES, options={"files": 8}),
        Kind(name="full /dev/shm", ends=(GOES_ON,), errors=_NO_FILES, options={"shared": 300_000}),
        Kind(name="kill -9 at the end", ends=(-KILL,), signals=((0.1, KILL),), phases=(END,)),
        Kind(name="SIGTERM at the end", ends=(-TERM, 143), signals=((0.1, TERM),), phases=(END,)),
        Kind(name="Ctrl-C at the end", ends=(-INT,), signals=((0.1, INT),), phases=(END,)),
        Kind(name="kill -9 and a bit flipped", ends=(-KILL,), signals=((soon, KILL),), damage=flip_bit),
        Kind(name="kill -9 and a file cut off", ends=(-KILL,), signals=((soon, KILL),), damage=truncate),
        Kind(name="fork that exits", ends=(GOES_ON,), options={"forks": "exits"}),
        Kind(name="fork that ends as a script does", ends=(GOES_ON,), errors=_WORKER, options={"forks": "ends"}),
        Kind(name="fork that calls the model", ends=(GOES_ON,), options={"forks": "calls"}),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, drawn."""

    number: int
    kind: str
    step: int
    phase: str
    replica: int
    chance: float
    """From 0 to 1: of a moment, a size or a place, as the kind needs it."""
    signals: tuple[tuple[float, int], ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def kinds() -> dict[str, Kind]:
    """Return all kinds by name."""
    return {kind.name: kind for kind in _kinds()}


def draw_plan(chance: random.Random, only: Sequence[str] = ()) -> list[Fault]:
    """Draw the faults of one training, in the order of its steps; some of them are two at once."""
    fitting = [k for k in _kinds() if not only or k.name in only]
    at_end = [k for k in fitting if END in k.phases]
    fitting = [k for k in fitting if k not in at_end]
    plan: list[Fault] = []
    step = FIRST_STEP + chance.randrange(LONGEST_GAP)
    while fitting and step <= LAST_FAULT:
        for _ in range(2 if chance.random() < 0.08 else 1):
            kind = chance.choices(fitting, [k.weight for k in fitting])[0]
            plan.append(_draw(chance, kind, step, len(plan)))
        step += 1 + chance.randrange(LONGEST_GAP)
    plan += [_draw(chance, chance.choice(at_end), LAST_STEP, len(plan))] if at_end else []
    return sorted(plan, key=lambda fault: (fault.step, (*PHASES, END).index(fault.phase)))


def read_plan(text: str, chance: random.Random) -> list[Fault]:
    """Read kinds and steps, as "kill -9@7,SIGTERM@9"; the rest is drawn."""
    pairs = [part.rsplit("@", 1) for part in text.split(",")]
    return [_draw(chance, kinds()[name], int(step), number) for number, (name, step) in enumerate(pairs)]


def _draw(chance: random.Random, kind: Kind, step: int, number: int) -> Fault:
    return Fault(
        number=number,
        kind=kind.name,
        step=step,
        phase=chance.choice(kind.phases),
        replica=chance.randrange(NUM_REPLICAS),
        chance=chance.random(),
        signals=tuple((chance.uniform(0, most), number) for most, number in kind.signals),
    )
