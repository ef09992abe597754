"""Random programs: what they consist of, drawn from a seed, and a description to read."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tests.parallel.programs.blocks import BLOCKS, FOR_SEQUENCES
from tests.parallel.programs.network import ANSWERS, CALLS, IN_MODEL, STEMS
from tests.parallel.programs.training import AFTER_BACKWARD, EVENTS, LOOPS

NUM_STEPS = 5

KINDS = ("classifier",) * 7 + ("adversarial pair", "carried state")
LOSSES = ("mse", "smooth l1", "cross entropy", "bce", *IN_MODEL)
OPTIMIZERS = ("sgd", "adam", "adamw", "two optimizers")
CELLS = ("RNN", "GRU", "LSTM")
PENALTIES = frozenset({"gradient penalty", "penalised parameter gradients"})


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model and its training, as code that runs on one device and on many."""

    seed: int
    kind: str
    stem: str
    blocks: tuple[str, ...]
    call: str
    answer: str
    loss: str
    loop: str
    events: frozenset[str]
    optimizer: str
    cell: str
    rows: tuple[int, ...]
    """Of each step's batches."""
    lengths: tuple[int, ...]
    num_parts: int
    """Batches whose gradients are summed before an update."""
    grows: bool
    """Each of them has a row more than the one before: captures of several kinds are replayed in turn."""
    keeps_grads: bool
    """``zero_grad(set_to_none=False)``."""
    autocast: bool
    counts: bool
    """The model counts its training steps in Python, and computes with the count."""
    counts_writes: bool
    """Frozen parameters are written in a way that torch counts; captures on demand don't look for others."""
    wraps_stem: bool
    """Only the stem is wrapped: what comes after it runs on its output as it is."""
    num_replicas: int
    split: Any
    gather: str
    bucket_cap_mb: float | None
    by_step: bool = False
    """``TrainStep`` does all of the loop."""
    reads_loss: bool = False
    """The step's loss is read on the host, which keeps it out of captures."""
    share: tuple[int, int] = (0, 1)
    """Which of how many ranks this is: it trains on its rows."""

    @property
    def features(self) -> frozenset[str]:
        flags = {"gradient accumulation": self.num_parts > 1, "zeroed gradients": self.keeps_grads}
        flags |= {"batches that grow": self.grows}
        flags |= {"wrapped stem": self.wraps_stem, "small buckets": self.bucket_cap_mb is not None}
        flags |= {"counted steps": self.counts and self.kind == "classifier", "autocast": self.autocast}
        flags |= {"fewer rows than devices": min(self.rows) < self.num_replicas}
        flags |= {"rows that change": len(set(self.rows)) > 1, self.cell: self.kind == "carried state"}
        flags |= {"lengths that change": len(set(self.lengths)) > 1}
        if self.kind == "classifier":
            flags |= dict.fromkeys((self.stem, self.call, f"{self.answer} output", self.loss, self.loop), True)
        named = {self.kind, self.optimizer, *self.blocks, *self.events, f"split {self.split}", f"{self.gather} outputs"}
        return frozenset(named | {name for name, is_on in flags.items() if is_on})

    def num_rows(self, step: int, part: int) -> int:
        return self.rows[step % len(self.rows)] + (part if self.grows else 0)

    @property
    def has_length(self) -> bool:
        return _has_length(self.kind, self.stem)

    @property
    def dtype(self) -> torch.dtype:
        """float64, in which replicas differ from one device by the order of additions; autocast takes float32."""
        return torch.float32 if self.autocast else torch.float64

    @property
    def options(self) -> dict[str, Any]:
        buffers = "mean" if "running mean" in self.blocks else "first"
        return {"split": self.split, "gather": self.gather, "buffers": buffers, "bucket_cap_mb": self.bucket_cap_mb}

    def describe(self) -> str:
        return "\n".join([f"program {self.seed}", *(f"  {name:<14}{value}" for name, value in asdict(self).items())])


def steady(program: Program) -> Program:
    """Return a program without what keeps its steps from being captured: other shapes, hooks, counters in Python."""
    blocks = tuple(name for name in program.blocks if name not in ("counter", "hooked"))
    events = frozenset(name for name in program.events if "hooks" not in name)
    loop = "plain" if program.loop in PENALTIES or program.loop == "input gradients" else program.loop
    rows, lengths = (program.rows[0],) * NUM_STEPS, (program.lengths[0],) * NUM_STEPS
    return replace(
        program, rows=rows, lengths=lengths, counts=False, counts_writes=True, blocks=blocks, events=events, loop=loop
    )


def classifier(seed: int) -> Program:
    """Return a program of that kind."""
    program = draw_program(seed)
    stem = "sequence" if program.kind == "carried state" else program.stem  # whose blocks may be for sequences
    return replace(program, kind="classifier", stem=stem)


def one_call(seed: int) -> Program:
    """Return a program that ``TrainStep`` can run, all of whose loop it replaces."""
    program = classifier(seed)
    events = {name for name in program.events if EVENTS[name][0] != AFTER_BACKWARD} - {"weights in one vector"}
    # Hooks see what accumulates in another unit.
    events -= {name for name in events if "hooks" in name and program.num_parts > 1}
    return replace(
        program, by_step=True, loop="plain", events=frozenset(events), wraps_stem=False, keeps_grads=False, grows=False,
        autocast=False, optimizer="adamw" if program.optimizer == "two optimizers" else program.optimizer,
        loss="mean in the model" if program.loss in IN_MODEL else program.loss,
    )  # fmt: skip


NOT_ON_RANKS = frozenset(
    {"reentrant checkpoint", "running mean", "moving", "averaged", "counter", "experts", "frozen norm"}
)
"""Refused there; or with state that is made of one rank's rows."""


def on_ranks(seed: int) -> Program:
    """Return a program without hooks on parameters, whose loss is a mean over rows; for odd seeds by ``TrainStep``."""
    program = one_call(seed) if seed % 2 else classifier(seed)
    return replace(
        program, loop="plain", autocast=False, counts=False, grows=False, wraps_stem=False, gather="sharded",
        loss="mean in the model" if program.loss in IN_MODEL else "mse", rows=tuple(max(3, n) for n in program.rows),
        events=frozenset(name for name in program.events if "hooks" not in name) - {"weights in one vector"},
        blocks=tuple(name for name in program.blocks if name not in NOT_ON_RANKS),
    )  # fmt: skip


def _has_length(kind: str, stem: str) -> bool:
    return kind == "carried state" or (kind == "classifier" and stem in ("sequence", "tokens"))


def draw_program(seed: int) -> Program:
    """Draw the program of a seed: the same one every time, and in every version of Python."""
    draw = random.Random(seed)
    kind, stem = draw.choice(KINDS), draw.choice(sorted(STEMS))
    loss, loop, autocast = draw.choice(LOSSES), draw.choice(("plain", *LOOPS)), draw.random() < 0.08
    names = [name for name in BLOCKS if _has_length(kind, stem) or name not in FOR_SEQUENCES]
    blocks = _allowed_blocks(draw.choices(names, k=draw.randint(0, 3)), kind=kind, loop=loop)
    # Statistics of a few rows make of bfloat16's rounding more than a tolerance can allow.
    autocast = autocast and "synchronised norm" not in blocks
    events = frozenset(draw.sample(list(EVENTS), k=draw.randint(0, 5)))
    num_replicas = draw.choice((2, 2, 3))
    varies = draw.random() < 0.5 and kind != "carried state"
    lowest = 2 if "synchronised norm" in blocks else 1
    usual = draw.randint(3, 8)
    rows = tuple(draw.choice((usual, draw.randint(lowest, 9), lowest)) if varies else usual for _ in range(NUM_STEPS))
    num_parts = draw.choice((1, 1, 2, 3))
    return Program(
        seed=seed,
        kind=kind,
        stem=stem,
        blocks=blocks,
        call=draw.choice(sorted(CALLS)),
        answer=draw.choice(sorted(ANSWERS)),
        loss=loss,
        loop=loop,
        events=_allowed_events(events, blocks),
        optimizer="sgd" if autocast else draw.choice(OPTIMIZERS),
        cell=draw.choice(CELLS),
        rows=rows,
        lengths=tuple(draw.randint(2, 4) for _ in range(NUM_STEPS)) if draw.random() < 0.5 else (3,) * NUM_STEPS,
        num_parts=num_parts,
        grows=draw.random() < 0.6 and num_parts > 1 and kind == "classifier",
        counts=draw.random() < 0.4,
        counts_writes=False,
        wraps_stem=draw.random() < 0.15 and kind == "classifier",
        keeps_grads=draw.random() < 0.3,
        autocast=autocast,
        num_replicas=num_replicas,
        split=draw.choice(("chunk", "even", [1.0, 2.0, 1.0][:num_replicas])),
        gather="joined" if draw.random() < 0.2 and loss not in IN_MODEL else "sharded",
        bucket_cap_mb=draw.choice((None, None, 0.0005)),
    )


def _allowed_events(events: frozenset[str], blocks: Sequence[str]) -> frozenset[str]:
    if "frozen midway" in events:  # torch warns of backward hooks where no input takes a gradient
        events = events - {"backward hooks"}
    # There, hooks on parameters see one replica's gradient at a time: docs/differences.md.
    return events - {"tensor hooks", "accumulation hooks"} if "reentrant checkpoint" in blocks else events


def _allowed_blocks(names: Sequence[str], *, kind: str, loop: str) -> tuple[str, ...]:
    """Replace blocks that torch or ``DataParallel`` refuses in such a program."""
    found = list(names)
    # torch: "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad()".
    if loop in PENALTIES or loop == "gradients by autograd.grad" or kind != "classifier":
        found = ["checkpoint" if name == "reentrant checkpoint" else name for name in found]
    # "SyncBatchNorm: gradients can't be differentiated again".
    if loop in PENALTIES:
        found = ["checkpoint" if name == "synchronised norm" else name for name in found]
    return tuple(found)
