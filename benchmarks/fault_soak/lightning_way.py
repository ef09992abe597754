"""Lightning's Trainer with ModelCheckpoint, under the same faults: hooks say and do what the other ways' loop does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.fault_soak.setup import Setup, newest_of
from benchmarks.fault_soak.task import DATA_TIMEOUT_S, KEEP, SAVE_EVERY, Net, Samples, digest_of, make_loader
from benchmarks.fault_soak.task import make_optimizer as make_plain_optimizer
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F

import everygpu

Tell = Callable[..., None]


class Classifier(LightningModule):
    """The net, its loss and its optimizer."""

    def __init__(self, net: Net, on: Callable[[int, str], None]) -> None:
        super().__init__()
        self.net, self._on = net, on

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        self._on(self.global_step + 1, "forward")
        return F.cross_entropy(self.net(images), labels)

    def on_before_backward(self, loss: Tensor) -> None:
        self._on(self.global_step + 1, "backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._on(self.global_step + 1, "update")

    def configure_optimizers(self) -> Any:
        optimizer = make_plain_optimizer(self.net)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Generators(Callback):
    """Saves torch's random generator, which Lightning leaves to callbacks."""

    def __init__(self) -> None:
        self._saved: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["rng"]

    def on_train_batch_start(self, *_: Any) -> None:
        if self._saved is not None:
            torch.set_rng_state(self._saved)
            self._saved = None


class Telling(Callback):
    """Tells the driver of each step."""

    def __init__(self, training: "LightningTraining") -> None:
        self._training = training

    def on_train_start(self, trainer: Any, module: Any) -> None:
        training = self._training
        if trainer.global_step:
            training.tell("resumed", trainer.global_step, training.digest())
        training.on(trainer.global_step + 1, "data")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._training.take(batch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        training, step = self._training, trainer.global_step
        training.tell("step", step, float(outputs["loss"]).hex(), training.digest() if training.digests else "")
        training.after_step(step)
        training.on(step, "save")


class TellingCheckpoint(ModelCheckpoint):
    """Tells the driver of each save, and keeps the newest, as the documents do with a metric that grows."""

    def __init__(self, root: Path, tell: Tell) -> None:
        super().__init__(
            root,
            "{step:08d}",
            monitor="step",
            mode="max",
            save_top_k=KEEP,
            every_n_train_steps=SAVE_EVERY,
            auto_insert_metric_name=False,
        )
        self._tell = tell

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        step = trainer.global_step
        self._tell("saves", step)
        super()._save_checkpoint(trainer, filepath)
        self._tell("returned", step)


class LightningTraining:
    """One training; ``fit`` goes on from the newest checkpoint to the last step."""

    def __init__(self, setup: Setup, root: Path, seed: int) -> None:
        self._root, self._num_steps = root, setup.num_steps
        torch.manual_seed(seed if newest_of("lightning", root) else 0)
        self.net, self.samples = Net(), Samples()
        self.digests = False
        self._trainer: Any = None

    def fit(
        self,
        *,
        on: Callable[[int, str], None],
        tell: Tell,
        take: Callable[[Any], None],
        after_step: Callable[[int], None],
        digest: Callable[[], str],
    ) -> None:
        """Train; the functions do what the other ways' loop does at the same places."""
        self.on, self.tell, self.take, self.after_step, self.digest = on, tell, take, after_step, digest
        data = everygpu.Feeder(make_loader(self.samples, timeout=DATA_TIMEOUT_S), "cpu", prefetch=0)
        self._trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=self._num_steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Generators(), Telling(self), TellingCheckpoint(self._root, tell)],
        )
        newest = newest_of("lightning", self._root)
        if newest is None:
            tell("resumed", 0, "")
        elif (found := read(newest))[0] >= self._num_steps:  # a Trainer that has nothing to do calls no hooks
            tell("resumed", found[0], digest_of(*found[1:]))
        self._trainer.fit(Classifier(self.net, on), data, ckpt_path=newest, weights_only=False)

    def evaluate(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.net.eval()(images)
        self.net.train()
        return found

    def end_pass(self) -> None:
        self._trainer = None

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.net.state_dict(), self._trainer.optimizers[0].state_dict()


def read(path: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Load a checkpoint; return its step, and the states of the net and of the optimizer."""
    state = torch.load(path, weights_only=False)
    model = {name.removeprefix("net."): value for name, value in state["state_dict"].items()}
    return state["global_step"], model, state["optimizer_states"][0]
