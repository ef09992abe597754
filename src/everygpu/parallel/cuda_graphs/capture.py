"""When a step is captured as a CUDA graph, and when the capture may be replayed in its place."""

import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from everygpu.devices.seed import spread_seeds
from everygpu.errors import CaptureError, SplitError
from everygpu.keys import compiled_original
from everygpu.parallel.compiler.capturable_graph import innermost
from everygpu.parallel.compiler.whole_graph import WholeGraph
from everygpu.parallel.cuda_graphs.batch_kinds import WINDOW, BatchKinds
from everygpu.parallel.cuda_graphs.executed_code import ExecutedCode
from everygpu.parallel.cuda_graphs.guards import ModuleGuards, find_hooks, is_observed, torch_settings
from everygpu.parallel.cuda_graphs.host_rng import (
    DRAW_GATE,
    HostGenerators,
    IdleDraws,
    draw_idly,
    is_same_state,
    keeps_dropout_state,
)
from everygpu.parallel.cuda_graphs.multi_gpu_graph import CAPTURE_LOCK, MultiGpuGraph, is_capturing, return_memory
from everygpu.parallel.cuda_graphs.reached_state import ReachedState
from everygpu.parallel.cuda_graphs.static_batch import (
    Batch,
    BatchLeaves,
    NotStatic,
    StaticBatch,
    describe_batch,
    leaves_of,
)
from everygpu.parallel.scatter.scatter import scatter_call
from everygpu.parallel.scatter.split import ScatterSpec

logger = logging.getLogger("everygpu")

MAX_OPEN = 3
"""Proofs that leave shapes open: one for each way through forward that depends on these."""

ALLOWED_S = 5.0
"""Seconds that proofs of further kinds of batches may take together at any time."""
ALLOWED_SHARE = 0.1
"""What part of a run they may take besides: a language model with twelve lengths takes 3 to 4 s for each."""


CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of the first replica."""


ForwardProof = Callable[[], bool]
"""The proof behind one capture: whether all that forward reads is unchanged, besides its arguments, which the
capture knows by kind, and torch's settings, which ``Capture`` guards. Replicas do with their rows what the first one
does with its own.
"""


class ForwardProofs:
    """Proofs for batches of several kinds. One that leaves shapes open serves for many."""

    def __init__(self) -> None:
        self._graphs: list[WholeGraph] = []
        self._num_open = 0
        self._began: float | None = None
        self._spent_s = 0.0

    def may_find(self, batch: Batch, spec: ScatterSpec) -> bool:
        """Whether looking for a proof takes no more of the run than is allowed."""
        if self._began is None or self._spent_s <= ALLOWED_S + ALLOWED_SHARE * (time.monotonic() - self._began):
            return True
        return self._known(*_first_call(batch, spec)) is not None

    def find(self, module: nn.Module, batch: Batch, spec: ScatterSpec, *, is_first: bool) -> ForwardProof | str:
        """Return a proof for the first replica's part of a batch, or why it failed.

        Args:
            is_first: Nothing is captured now: proofs that don't hold are dropped.
        """
        call = _first_call(batch, spec)
        graph: WholeGraph | str | None = self._known(*call)
        if graph is None:
            start = time.monotonic()
            graph = self._prove(module, call, is_first=is_first)
            if self._began is None:
                self._began = time.monotonic()
            else:
                self._spent_s += time.monotonic() - start
        return graph if isinstance(graph, str) else partial(graph.still_holds, *call)

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WholeGraph | None:
        return next((graph for graph in self._graphs if graph.holds(args, kwargs)), None)

    def _prove(self, module: nn.Module, call: CallArguments, *, is_first: bool) -> WholeGraph | str:
        if is_first:
            self._graphs, self._num_open = [], 0
        graph = WholeGraph(compiled_original(module) or module)  # compiled code does what its original does
        # Not at first, as it takes longer and most models are trained on batches of one kind; nor again and again, as
        # some modules have to be traced for each shape.
        is_open = bool(self._graphs) and self._num_open < MAX_OPEN
        self._num_open += is_open
        reason = graph.prove(*call, any_shapes=True) if is_open else None
        if reason is not None:
            self._num_open = MAX_OPEN  # it takes as long each time
        if not is_open or reason is not None:
            reason = graph.prove(*call)
        if reason is not None:
            return reason
        self._graphs.append(graph)
        return graph


def _first_call(batch: Batch, spec: ScatterSpec) -> CallArguments:
    args, kwargs, _ = batch
    call = scatter_call(args, kwargs, spec.devices, spec.dim, spec.split)
    return call.args[0], call.kwargs[0]


MAX_ATTEMPTS = 12
"""How often captures are made again until one has been replayed ``LONG`` times: a model that changes all the time
isn't worth more."""

_LOADING_S = 2.0
"""How long a capture waits for a batch that another thread is loading."""
LONG = 100
"""Replays after which attempts are counted again."""


Result = TypeVar("Result")


class Capturable(ABC, Generic[Result]):
    """A step that ``Capture`` can capture: what is done with one batch."""

    @abstractmethod
    def roots(self) -> list[nn.Module]:
        """List the roots of the modules that take part now."""

    def others(self) -> list[Any]:
        """List what a step begins at besides the modules, such as a loss."""
        return []

    @abstractmethod
    def state(self) -> Hashable:
        """Return what a capture depends on besides the batch, the modules and torch's settings."""

    @abstractmethod
    def unsupported_reason(self) -> str | None:
        """Say why the step is better not captured."""

    def needs_proof(self) -> bool:
        """Whether Dynamo has to prove that a replay does what forward would do; raise where it can't."""
        return False

    def forwarding(self) -> AbstractContextManager[Any]:
        """Apply the torch settings that forward runs under, within the block."""
        return nullcontext()

    @abstractmethod
    def prepare(self) -> Any:
        """Prepare for a capture; what is returned goes to ``capture``."""

    @abstractmethod
    def capture_work(self, graph: MultiGpuGraph, batch: StaticBatch, prepared: Any) -> Any:
        """Capture the step's work on a batch in the graph; the result is passed to ``begin`` and ``finish``."""

    def try_otherwise(self) -> bool:
        """After a failure, switch to another way of capture; False when none is left."""
        return False

    @abstractmethod
    def give_up(self, reason: str) -> None:
        """Release what captures need: steps run eagerly from now on."""

    def begin(self, result: Any) -> bool:
        """Prepare for a replay; False when this step has to run eagerly."""
        return True

    @abstractmethod
    def finish(self, result: Any) -> Result:
        """Return the step's result after a replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CapturedStep:
    batch: StaticBatch
    graph: MultiGpuGraph
    result: Any
    proof: ForwardProof | None
    """That a replay does what the forward would do; None where the caller has said so."""
    num_idle_draws: int = 0
    """How often each step draws from the host's generator for nothing."""


class Capture(Generic[Result]):
    """Captures steps as CUDA graphs after a few with batches of one kind, and replays them from then on.

    A capture is replayed only while everything it was made from is as it was: shapes and values of the batch, all
    that ``ReachedState`` finds, parameters and buffers where they were, torch's settings. Where that can't be seen,
    nothing is captured, unless the caller has promised that it stays. While a mode or a hook of torch's observes every
    operation, steps run eagerly.

    Args:
        step: What is captured.
        name: What messages call the steps' owner.
        route: How batches are cut.
        must: Raise where a step can't be captured, and capture also where hooks would no longer be called.
        level: Of the log line that says why steps run eagerly.
        proves: Each capture has a proof of what forward does, hooks and all, and also sends frozen parameters, which
            may be written in between.
        proves_hooks: A capture has such a proof where there are hooks of forward.
        is_promised: What can't be seen, such as a generator's state, doesn't change what steps do.
        gives_up: Give up where hardly any kind of batch comes again, as ``BatchKinds`` says.
        by_replica: Replicas draw random numbers of their own, whichever device they are on. The host's would be drawn
            by each replica: a capture has none.
    """

    def __init__(
        self,
        step: Capturable[Result],
        name: str,
        route: ScatterSpec,
        *,
        must: bool = False,
        level: int = logging.INFO,
        proves: bool = False,
        proves_hooks: bool = False,
        is_promised: bool = False,
        gives_up: bool = True,
        by_replica: bool = False,
    ) -> None:
        self.reason: str | None = None
        """Why no step will be captured any more, if so."""
        self._proves = proves
        self._proves_hooks = proves or proves_hooks
        self._gives_up = gives_up
        self._by_replica = by_replica
        self._kinds = BatchKinds(name, route.devices)
        self._proofs = ForwardProofs()
        self._step = step
        self._name = name
        self._route = route
        self._must = must
        self._is_promised = is_promised or must
        self._code = ExecutedCode()
        self._notes_code = False
        self._level = level
        self._graphs: dict[Any, _CapturedStep] = {}
        self._guard_key: Any = None
        self._guards: ModuleGuards | None = None
        self._change: str | None = None
        """What was last found to be other than the step before."""
        self._num_attempts = 0
        self._num_replays = 0
        self._num_failures = 0

    def run(self, batch: Batch) -> Result | None:
        """Run a step by its capture, making one if it is time to.

        Returns:
            The step's result; None where the step has to run eagerly, which the caller does.
        Raises:
            CaptureError: the step can't be captured, though it must.
        """
        if self.reason is not None or is_capturing() or (is_observed() and not self._must) or not self._passes_guards():
            return None
        try:
            leaves = leaves_of(batch)
            key = describe_batch(batch, self._route, leaves)
        except NotStatic as reason:
            if self._must or not self._kinds.has_captured:
                self._give_up(str(reason))
            else:
                self._kinds.report(f"{reason}.")
            return None
        except SplitError:  # the step itself says so
            return None
        captured = self._graphs.get(key)
        if not self._kinds.come_again(key) and self._gives_up:
            self._give_up(f"of {WINDOW} batches hardly any had the shapes of one before")
            return None
        if captured is None:
            if not self._kinds.is_due(key):
                self._notes_code = not self._proves and self._kinds.is_to_be_noted(key)
                return None
            if self._proves and not self._proofs.may_find(batch, self._route):
                return None
            with CAPTURE_LOCK.taken() as is_ours:
                captured = self._capture(key, batch) if is_ours else None
        spread_seeds(self._route.devices)
        return None if captured is None else self._launch(key, captured, batch, leaves)

    @contextmanager
    def running_eagerly(self) -> Iterator[None]:
        """Run an eager step within, after ``run`` has returned None."""
        notes_code, self._notes_code = self._notes_code, False
        if not notes_code:
            yield
            return
        with torch.autograd.set_multithreading_enabled(False), self._code.noting():  # backward, in this thread
            yield

    def _launch(self, key: Any, captured: _CapturedStep, batch: Batch, leaves: BatchLeaves) -> Result | None:
        with captured.graph.may_replay() as may_replay:
            if not may_replay or not self._holds(captured) or not self._step.begin(captured.result):
                return None
            captured.batch.write(batch, leaves)
            captured.graph.replay()
            draw_idly(captured.num_idle_draws)
        self._kinds.note_use(key)
        self._num_replays += 1
        if self._num_replays % LONG == 0:
            self._num_attempts = 0
        return self._step.finish(captured.result)

    def _holds(self, captured: _CapturedStep) -> bool:
        with self._step.forwarding():
            holds = captured.proof is None or captured.proof()
        if not holds:
            self.forget()
        return holds

    @property
    def has_graphs(self) -> bool:
        """Whether there are any."""
        return bool(self._graphs)

    def forget(self) -> bool:
        """Drop all captures, with their memory; return whether there were any."""
        had_some = bool(self._graphs)
        self._graphs.clear()
        self._kinds.forget()
        return had_some

    def _passes_guards(self) -> bool:
        """Whether captures are still valid, and drop them if not."""
        key = (self._step.state(), *torch_settings())
        roots, others, guards = self._step.roots(), self._step.others(), self._guards
        # Before there is a capture, addresses don't matter: a recurrent layer may move its weights in each forward.
        if guards is not None and not guards.is_current(roots, others, addresses=bool(self._graphs)):
            change = guards.find_change()
            self._change = guards.find_written() or (change and f"{change} is another than in the step before")
            guards = None
        if guards is not None and key == self._guard_key:
            self._num_failures = 0
            if guards.version == self._code.version:
                return True
        else:
            self.forget()
            self._num_failures += 1
        is_passed = self._num_failures == 0  # only more code is known
        if guards is None or is_passed:
            guards = ModuleGuards(roots, others, None if self._proves else self._code)
        self._guards, self._guard_key = guards, key
        reason = self._step.unsupported_reason() or self._find_shared_dropout(roots) or self._find_unseen(guards)
        if reason is not None and not self._must:
            self._give_up(reason)
        elif self._num_failures > MAX_ATTEMPTS:
            self._give_up(self._change or "the modules, or torch's settings, are others at every step")
        return is_passed and self.reason is None

    def _find_shared_dropout(self, roots: Sequence[nn.Module]) -> str | None:
        if self._by_replica and self._route.devices[0].type == "cuda" and keeps_dropout_state(roots):
            return "cuDNN's dropout between recurrent layers draws numbers of the GPU's, not of each replica's own"
        return None

    def _find_unseen(self, guards: ModuleGuards) -> str | None:
        """Say why a replay wouldn't do what the step does, if that is known."""
        state, roots = guards.state, self._step.roots()
        if (reason := find_hooks(roots, are_proven=self._proves_hooks)) is not None or state is None:
            return reason
        mine = {id(m) for root in roots for m in root.modules()}
        if reason := find_hooks([], others=[m for m in state.modules if id(m) not in mine]):
            return reason
        if len(self._route.devices) > 1 and (reason := guards.find_copied()) is not None:
            return reason
        return None if self._is_promised else state.unseen

    def _capture(self, key: Any, batch: Batch) -> _CapturedStep | None:
        self._num_attempts += not self._graphs
        if self._num_attempts > MAX_ATTEMPTS:
            last = f": {self._change}" if self._change else ""
            self._give_up(f"captures were made {MAX_ATTEMPTS} times, and none served for long{last}")
            return None
        version = self._code.version
        self._graphs.pop(self._kinds.kind_to_evict(), None)
        with DRAW_GATE.alone(_LOADING_S) as is_alone:
            found, has_drawn = self._attempt_all(batch)
        if self._code.version != version:  # what more is read is held from the next step on
            return None
        if has_drawn and not isinstance(found, str):
            if not is_alone:  # a thread that loads a batch may have drawn instead: try at a later step
                return None
            found = "the step, or another thread, draws random numbers on the host, which a capture would repeat"
        if not isinstance(found, str) and self._guards is not None:
            if change := self._guards.find_change():
                found = f"the step writes {change}, which a capture doesn't repeat"
            else:
                self._guards.walk()  # a function that had other code when this began was not looked into
                unseen = self._find_unseen(self._guards)
                found = found if unseen is None or self._must else unseen
        if isinstance(found, str):
            # Captures of other kinds may have been dropped by this attempt: they are made again.
            if self._kinds.has_captured and not self._must:
                self._kinds.refuse(key, found)
            else:
                self._give_up(found)
            return None
        if self._guards is not None and not self._graphs:
            self._guards.note_addresses()
        self._graphs[key] = found
        self._kinds.note_use(key)
        return found

    def _attempt_all(self, batch: Batch) -> tuple[_CapturedStep | str, bool]:
        """Capture, in another way if need be, or say why not. Also say whether the host drew random numbers."""
        state = None if self._guards is None else self._guards.state
        state = ReachedState([*self._step.others(), *self._step.roots()], (), self._code) if state is None else state
        generators = HostGenerators(state.generators)
        before = generators.states()
        held = StaticBatch(batch, self._route)
        held.write(batch)
        spread_seeds(self._route.devices)
        found = self._attempt(held)
        while isinstance(found, str) and self._step.try_otherwise():
            generators.restore(before)
            found = self._attempt(held)
        after = generators.states()
        has_drawn = not all(map(is_same_state, before, after))
        if has_drawn and not isinstance(found, str) and not self._by_replica:
            num = self._count_idle_draws(held, generators, before, after)
            has_drawn = num is None
            found = replace(found, num_idle_draws=num or 0)
        generators.restore(before)
        return found, has_drawn

    def _count_idle_draws(
        self, held: StaticBatch, generators: HostGenerators, before: Sequence[Any], after: Sequence[Any]
    ) -> int | None:
        """Capture once more, only to look at what is drawn; None where any of it may decide something."""
        generators.restore(before)
        with IdleDraws() as draws:
            found = self._attempt(held)
        if isinstance(found, str) or draws.num is None:
            return None
        generators.restore(before)
        draw_idly(draws.num)
        return draws.num if all(map(is_same_state, after, generators.states())) else None

    def _attempt(self, held: StaticBatch) -> _CapturedStep | str:
        """Capture, or say why not."""
        others = next(iter(self._graphs.values()), None)
        # They are replayed in turn, and nothing has to stay in their memory in between.
        graph = MultiGpuGraph(self._route.devices) if others is None else others.graph.new_in_same_pool()
        if self._by_replica:
            graph.add_generators(self._route.devices)
        try:
            prepared, before = self._step.prepare(), held.versions()
            proof = self._prove(held) if self._step.needs_proof() else None
            with nullcontext() if self._proves else self._code.noting():
                result = self._step.capture_work(graph, held, prepared)
            if held.versions() != before:
                raise CaptureError("the batch is written to, and a capture has its own copy of it")
            return _CapturedStep(batch=held, graph=graph, result=result, proof=proof)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step runs eagerly
            failure = _describe(error)
        if graph.has_replaced_generators:
            self._graphs.clear()
        # Once more, without the graph of autograd that the exception held.
        return_memory(self._route.devices)
        return failure

    def _prove(self, held: StaticBatch) -> ForwardProof:
        with self._step.forwarding():
            root, batch = self._step.roots()[0], held.read()
            proof = self._proofs.find(root, batch, self._route, is_first=not self._graphs)
        if isinstance(proof, str):
            raise CaptureError(proof)
        return proof

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self.forget()
        self._step.give_up(reason)
        if self._must:
            raise CaptureError(
                f"{self._name}: the step must be capturable under capture=True, but {reason}. "
                f"Pass capture='auto' to run such steps as they are."
            )
        logger.log(self._level, "%s: steps run without CUDA graphs: %s.", self._name, reason)


def _describe(error: Exception) -> str:
    """Say why a capture failed, and at which line of the user's code, if it was in one."""
    frame = innermost(traceback.extract_tb(error.__traceback__))
    is_users = frame is not None and not Path(frame.filename).is_relative_to(Path(torch.__file__).parent)
    where = f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}: " if frame is not None and is_users else ""
    kind = "" if isinstance(error, CaptureError) else f"{type(error).__name__}: "
    message = (str(error).splitlines() or [""])[0].removeprefix("DataParallel: ").rstrip(".")
    return f"{where}{kind}{message}"
