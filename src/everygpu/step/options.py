"""What a training step may be made of."""

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everygpu.errors import OptimizerError, OptionError
from everygpu.parallel.data_parallel import DataParallel
from everygpu.step.local_update import LocalUpdate
from everygpu.step.sharded_optimizer import ShardedOptimizer
from everygpu.step.sharded_update import ShardedUpdate
from everygpu.step.shards import can_shard
from everygpu.step.update_strategy import UpdateStrategy

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger("everygpu")


def check_options(loss: Any, precision: Any, accumulate: Any, clip_norm: Any, weight: Any = None) -> None:
    """Refuse options that a step can't have."""
    if weight is not None and not callable(weight):
        raise OptionError(
            f"TrainStep: weight must be callable as the step is, or None for the rows of a batch, got "
            f"{type(weight).__qualname__}. Pass for instance lambda x, y: (y != -100).sum()."
        )
    if loss is not None and not callable(loss):
        raise OptionError(
            f"TrainStep: loss must be callable as loss(output, *targets), or None when the model returns it, "
            f"got {type(loss).__qualname__}. Pass for instance torch.nn.CrossEntropyLoss()."
        )
    if precision not in PRECISIONS:
        raise OptionError(f"TrainStep: precision must be one of {tuple(PRECISIONS)}, got {precision!r}.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise OptionError(f"TrainStep: accumulate must be a whole number of 1 or more, got {accumulate!r}.")
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise OptionError(f"TrainStep: clip_norm must be a number above 0, or None, got {clip_norm!r}.")


def wrap_model(model: nn.Module, *, compile: bool) -> DataParallel:
    """Return a module over every device; a ``DataParallel`` as it is."""
    if not isinstance(model, DataParallel):
        return DataParallel(model, engine="compile" if compile else "auto")
    if compile and model.engine != "compile":
        raise OptionError(
            f"TrainStep: compile=True needs a DataParallel with engine='compile', got engine={model.engine!r}. "
            f"Pass it there, or pass the bare module here."
        )
    return model


def check_gathering(model: DataParallel) -> None:
    """Reject ``gather="joined"`` with ``loss=None``: the replicas' row counts are unknown."""
    if model.gather == "joined" and len(model.device_ids) > 1:
        raise OptionError(
            "TrainStep: loss=None needs a DataParallel with gather='sharded', which knows the rows behind each loss, "
            "got gather='joined'. Pass gather='sharded' there, or a loss here."
        )


def can_capture(model: DataParallel, capture: Any) -> bool:
    """Tell whether steps may be recorded: only where there are CUDA graphs."""
    if not isinstance(capture, bool) and capture != "auto":
        raise OptionError(f"TrainStep: capture must be 'auto', True or False, got {capture!r}.")
    on_gpus = all(d.type == "cuda" for d in model.device_ids)
    if capture is True and not on_gpus:
        raise OptionError(
            f"TrainStep: capture=True needs CUDA devices, got {', '.join(str(d) for d in model.device_ids)}. "
            f"Pass capture='auto'."
        )
    return on_gpus and capture is not False


def make_strategy(model: DataParallel, optimizer: Any, *, captures: bool) -> UpdateStrategy:
    """Choose where gradients are and what applies them, by optimizer and devices."""
    if not captures:
        model.give_up_recording("TrainStep was made with capture=False")
    if isinstance(optimizer, ShardedOptimizer):
        return ShardedUpdate(model, optimizer, fixed=captures)
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"TrainStep: needs a torch optimizer or a ShardedOptimizer, got {type(optimizer).__qualname__}. "
            f"Pass for instance torch.optim.AdamW(model.parameters())."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "TrainStep: the optimizer must step without a closure, got LBFGS, which evaluates the loss several times "
            "in a step. Use DataParallel in an ordinary loop."
        )
    if len(model.device_ids) == 1 and not captures and model.rank_model is None:
        return LocalUpdate(model, optimizer)
    if not can_shard(optimizer):
        logger.info("TrainStep: %s can't be spread; it steps on %s.", type(optimizer).__name__, model.device_ids[0])
        return LocalUpdate(model, optimizer)
    return ShardedUpdate(model, ShardedOptimizer.of(optimizer, model.device_ids), fixed=captures)
