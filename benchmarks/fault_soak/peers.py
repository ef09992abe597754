"""The peers: plain loops on one device, which save as PyTorch's documents show it."""

import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from benchmarks.fault_soak.setup import Setup, newest_of
from benchmarks.fault_soak.task import DATA_TIMEOUT_S, KEEP, SAVE_EVERY, Net, Samples, make_loader, make_optimizer
from torch import Tensor
from torch.nn import functional as F

import everygpu


class _Plain:
    """A plain loop on one device. The data's position is kept by our Feeder: it is not what is compared."""

    def __init__(self, setup: Setup, root: Path, seed: int) -> None:
        self._root = root
        torch.manual_seed(seed if newest_of(setup.way, root) else 0)
        self.net, self.samples = Net(), Samples()
        self._optimizer = make_optimizer(self.net)
        self._scheduler = torch.optim.lr_scheduler.ExponentialLR(self._optimizer, gamma=0.99)
        self._data = everygpu.Feeder(make_loader(self.samples, timeout=DATA_TIMEOUT_S), "cpu", prefetch=0)
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
        path = newest_of("torch", self._root)
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
        path = newest_of("dcp", self._root)
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
