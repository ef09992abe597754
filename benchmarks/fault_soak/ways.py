"""The ways to train and to save: everygpu's, and those of the peers, each as its own documents show it."""

import importlib.util
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from benchmarks.fault_soak.task import (
    DATA_TIMEOUT_S,
    KEEP,
    LAST_STEP,
    SAVE_EVERY,
    Net,
    Samples,
    make_loader,
    make_optimizer,
)
from torch import Tensor, nn
from torch.nn import functional as F

import everygpu

LOOPS = ("plain", "TrainStep", "ShardedOptimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How one training is set up; a seed has drawn it."""

    way: str
    engine: str = ""
    loop: str = "plain"
    asynchronous: bool = False
    goes_on: bool = False
    """Whether the script catches errors, loads the newest checkpoint and goes on, or ends with them."""
    in_block: bool = False
    """Whether the manager is used in a ``with`` block."""
    num_steps: int = LAST_STEP
    saves_feeder: bool = False
    """Whether the position is saved of the Feeder, or of the loader below it."""

    @property
    def name(self) -> str:
        """The name of its column."""
        return f"everygpu, {self.engine}" if self.way == "everygpu" else WAYS[self.way].name

    @property
    def reference(self) -> tuple[str, ...]:
        """What decides the numbers."""
        return (self.way, self.engine, self.loop)


class Training(Protocol):
    """A model, its data, and checkpoints of both."""

    net: Net
    samples: Samples

    def resume(self) -> int: ...

    def batches(self) -> Iterator[Any]: ...

    def end_pass(self) -> None: ...

    def train(self, images: Any, labels: Any, on: Callable[[str], object]) -> Tensor: ...

    def evaluate(self, images: Tensor) -> Tensor: ...

    def save(self, step: int) -> bool: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]: ...


class EveryGPU:
    """DataParallel or TrainStep, a Feeder over a ResumableLoader, and a CheckpointManager."""

    def __init__(self, setup: Setup, root: Path, seed: int) -> None:
        self.checkpoints = everygpu.CheckpointManager(
            root, keep=KEEP, every=SAVE_EVERY, asynchronous=setup.asynchronous
        )
        everygpu.seed_all(seed if self.checkpoints.latest() else 0)
        self.net, self.samples = Net(), Samples()
        self.model = everygpu.DataParallel(self.net, ["cpu"] * 2, engine=setup.engine)
        self.optimizer = make_optimizer(self.model)
        self._scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.99)
        self._step: everygpu.TrainStep | None = None
        if setup.loop == "ShardedOptimizer":
            self.optimizer = everygpu.ShardedOptimizer(self.optimizer, ["cpu"] * 2)
        if setup.loop == "TrainStep":
            self._step = everygpu.TrainStep(self.model, F.cross_entropy, self.optimizer)
        data = everygpu.ResumableLoader(make_loader(self.samples))
        self._feeder = everygpu.Feeder(data, self.model, timeout=DATA_TIMEOUT_S)
        self._parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self._scheduler,
            "data": self._feeder if setup.saves_feeder else data,
        }

    def resume(self) -> int:
        if not self.checkpoints.latest():
            return 0
        return int(self.checkpoints.load(**self._parts, rng=True)["step"])

    def batches(self) -> Iterator[Any]:
        return iter(self._feeder)

    def end_pass(self) -> None:
        self._feeder.close()

    def train(self, images: Any, labels: Any, on: Callable[[str], object]) -> Tensor:
        self.model.train()
        on("forward")
        if self._step is not None:
            loss = self._step(images, labels)
            on("backward")
            on("update")
        else:
            loss = F.cross_entropy(self.model(images), labels)
            on("backward")
            self.optimizer.zero_grad()
            loss.backward()
            on("update")
            self.optimizer.step()
        self._scheduler.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> Tensor:
        self.model.eval()
        found: Tensor = self.model(images)
        self.model.train()
        return found

    def save(self, step: int) -> bool:
        return self.checkpoints.save(step, **self._parts) is not None

    def wait(self) -> None:
        self.checkpoints.wait()

    def close(self) -> None:
        self.checkpoints.close()

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.net.state_dict(), self.optimizer.state_dict()


class _Plain:
    """A plain loop on one device. The data's position is kept by our ResumableLoader: it is not what is compared."""

    def __init__(self, setup: Setup, root: Path, seed: int) -> None:
        self._root = root
        torch.manual_seed(seed if _newest_of(setup.way, root) else 0)
        self.net, self.samples = Net(), Samples()
        self._optimizer = make_optimizer(self.net)
        self._scheduler = torch.optim.lr_scheduler.ExponentialLR(self._optimizer, gamma=0.99)
        self._data = everygpu.ResumableLoader(make_loader(self.samples, timeout=DATA_TIMEOUT_S))
        self._pass: Iterator[Any] | None = None

    def batches(self) -> Iterator[Any]:
        self._pass = iter(self._data)
        return self._pass

    def end_pass(self) -> None:
        self._pass = None

    def train(self, images: Tensor, labels: Tensor, on: Callable[[str], object]) -> Tensor:
        self.net.train()
        on("forward")
        loss = F.cross_entropy(self.net(images), labels)
        on("backward")
        self._optimizer.zero_grad()
        loss.backward()
        on("update")
        self._optimizer.step()
        self._scheduler.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> Tensor:
        self.net.eval()
        found: Tensor = self.net(images)
        self.net.train()
        return found

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self.wait()

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.net.state_dict(), self._optimizer.state_dict()

    def _collect(self, step: int) -> dict[str, Any]:
        parts = {"model": self.net, "optimizer": self._optimizer, "scheduler": self._scheduler, "data": self._data}
        return {**{name: part.state_dict() for name, part in parts.items()}, "rng": torch.get_rng_state(), "step": step}

    def _put_back(self, state: dict[str, Any]) -> int:
        self.net.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        self._data.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
        return int(state["step"])


class TorchSave(_Plain):
    """``torch.save`` to one path, as PyTorch's tutorial on general checkpoints does."""

    def resume(self) -> int:
        path = _newest_of("torch", self._root)
        return self._put_back(torch.load(path, weights_only=False)) if path else 0

    def save(self, step: int) -> bool:
        if step % SAVE_EVERY:
            return False
        torch.save(self._collect(step), self._root / "checkpoint.pt")
        return True


class Distributed(_Plain):
    """``torch.distributed.checkpoint`` to a folder for each step; older ones are removed once a newer one is done."""

    def __init__(self, setup: Setup, root: Path, seed: int) -> None:
        super().__init__(setup, root, seed)
        self._asynchronous = setup.asynchronous
        self._saving: Future[Any] | None = None

    def resume(self) -> int:
        path = _newest_of("dcp", self._root)
        return 0 if path is None else self._put_back(load_distributed(path, self._collect(0)))

    def _collect(self, step: int) -> dict[str, Any]:
        state = super()._collect(step)
        return {**state, "data": pickle.dumps(state["data"])}  # of another form in the middle of a pass: a leaf

    def _put_back(self, state: dict[str, Any]) -> int:
        return super()._put_back({**state, "data": pickle.loads(state["data"])})

    def save(self, step: int) -> bool:
        import torch.distributed.checkpoint as dcp

        if step % SAVE_EVERY:
            return False
        self.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path, state = self._root / f"{step:08d}", self._collect(step)
            if self._asynchronous:
                self._saving = dcp.async_save(state, checkpoint_id=path, no_dist=True)
            else:
                dcp.save(state, checkpoint_id=path, no_dist=True)
                self._remove_old()
        return True

    def wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
            self._remove_old()

    def _remove_old(self) -> None:
        for old in sorted(path.parent for path in self._root.glob("*/.metadata"))[:-KEEP]:
            shutil.rmtree(old)


def load_distributed(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Load into the state of a training of the same kind, which says what there is; the optimizer's may be empty."""
    import torch.distributed.checkpoint as dcp

    if not state["optimizer"]["state"]:
        params = [value for name, value in state["model"].items() if name in dict(Net().named_parameters())]
        state["optimizer"]["state"] = {
            i: {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            for i, p in enumerate(params)
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way, as the driver knows it."""

    name: str
    module: str
    """Must be importable."""
    begin: Callable[[Setup, Path, int], Training]
    is_asynchronous: bool = True
    """Whether it has background saves."""

    def is_there(self) -> bool:
        return importlib.util.find_spec(self.module.partition(".")[0]) is not None


def _lightning(setup: Setup, root: Path, seed: int) -> Any:
    from benchmarks.fault_soak.lightning_way import LightningTraining  # takes seconds

    return LightningTraining(setup, root, seed)


WAYS = {
    "everygpu": Way(name="everygpu", module="everygpu", begin=EveryGPU),
    "torch": Way(name="torch.save", module="torch", begin=TorchSave, is_asynchronous=False),
    "dcp": Way(name="DCP", module="torch.distributed.checkpoint", begin=Distributed),
    "lightning": Way(name="Lightning", module="lightning.pytorch", begin=_lightning, is_asynchronous=False),
}


def _newest_of(way: str, root: Path) -> Path | None:
    """Return the newest checkpoint that a script of this way would take."""
    if way == "torch":
        path = root / "checkpoint.pt"
        return path if path.exists() else None
    if way == "lightning":
        return max(root.glob("*.ckpt"), default=None)
    return max((path.parent for path in root.glob("*/.metadata")), default=None)


def has_saved(way: str, root: Path) -> bool:
    """Tell whether there is a checkpoint to go back to."""
    if way == "everygpu":
        return everygpu.CheckpointManager(root).latest() is not None
    return _newest_of(way, root) is not None


def read_newest(way: str, root: Path) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """Load the newest checkpoint into a bare model; return its step and both states, or None where there is none.

    Raises:
        Exception: it can't be loaded.
    """
    net: nn.Module = Net()
    optimizer = make_optimizer(net)
    if way == "everygpu":
        if everygpu.CheckpointManager(root).latest() is None:
            return None
        step = everygpu.load(root, model=net, optimizer=optimizer)["step"]
        return step, net.state_dict(), optimizer.state_dict()
    path = _newest_of(way, root)
    if path is None:
        return None
    if way == "lightning":
        from benchmarks.fault_soak.lightning_way import read

        return read(path)
    if way == "dcp":
        state = load_distributed(path, Distributed(Setup(way=way), root, 0)._collect(0))
    else:
        state = torch.load(path, weights_only=False)
    return state["step"], state["model"], state["optimizer"]
