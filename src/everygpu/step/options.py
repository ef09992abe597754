"""Checks of a training step's options."""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everygpu.errors import OptimizerError, OptionError
from everygpu.parallel.data_parallel import DataParallel, overridden
from everygpu.parallel.fully_sharded.model import ShardedRankModel, is_sharded
from everygpu.step.finite_check import RULES
from everygpu.step.sharded_optimizer import ShardedOptimizer
from everygpu.step.sharded_update import ShardedUpdate
from everygpu.step.shards import all_params, can_shard
from everygpu.step.strategy import FullyShardedUpdate, StockUpdate, UpdateStrategy

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger("everygpu")


def check_options(
    loss: Any, precision: Any, accumulate: Any, clip_norm: Any, on_nonfinite: Any, weight: Any, check_every: Any
) -> None:
    """Refuse options that a step can't have."""
    if weight is not None and not callable(weight):
        raise OptionError(
            f"TrainStep: weight must be callable with inputs and targets, or None for the rows of a batch, got "
            f"{type(weight).__qualname__}. Pass for instance lambda x, y: (y != -100).sum()."
        )
    if loss is not None and not callable(loss):
        raise OptionError(
            f"TrainStep: loss must be callable as loss(output, *targets), or None when the model returns it, "
            f"got {type(loss).__qualname__}. Pass for instance torch.nn.CrossEntropyLoss()."
        )
    if isinstance(loss, type):
        raise OptionError(
            f"TrainStep: loss must be callable as loss(output, *targets), got the class {loss.__qualname__}, whose "
            f"call makes a loss. Pass {loss.__qualname__}()."
        )
    if precision not in PRECISIONS:
        raise OptionError(f"TrainStep: precision must be one of {tuple(PRECISIONS)}, got {precision!r}.")
    if on_nonfinite not in RULES:
        raise OptionError(f"TrainStep: on_nonfinite must be one of {RULES}, got {on_nonfinite!r}.")
    if not _is_count(accumulate):
        raise OptionError(f"TrainStep: accumulate must be a whole number of 1 or more, got {accumulate!r}.")
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise OptionError(f"TrainStep: clip_norm must be a number above 0, or None, got {clip_norm!r}.")
    if check_every is not None and not _is_count(check_every):
        raise OptionError(
            f"TrainStep: check_every must be a whole number of updates, 1 or more, or None, got {check_every!r}."
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Run forward under autocast; None for no autocast."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def wrap_model(model: nn.Module, *, compile: bool) -> DataParallel:
    """Return a module over every device; a ``DataParallel`` as it is."""
    if not isinstance(compile, bool):
        raise OptionError(
            f"TrainStep: compile must be True or False, got {compile!r}. torch.compile's modes have no place in a step."
        )
    if not isinstance(model, DataParallel):
        return DataParallel(model, engine="compile" if compile else "auto")
    if compile and model.engine != "compile":
        raise OptionError(
            f"TrainStep: compile=True needs a DataParallel with engine='compile', got engine={model.engine!r}. "
            f"Pass it there, or pass the bare module here."
        )
    return model


def check_model(model: DataParallel, loss: Any, optimizer: Any, weight: Any) -> None:
    """Refuse a model with options that don't do in a step what they say."""
    _check_trains(model, loss, optimizer)
    # With loss=None the replicas' row counts would be unknown.
    if loss is None and model.gather_rule == "joined" and len(model.replica_devices) > 1:
        raise OptionError(
            "TrainStep: loss=None needs a DataParallel with gather='sharded', which knows the rows behind each loss, "
            "got gather='joined'. Pass gather='sharded' there, or a loss here."
        )
    if model.replicas_per_device and model.rank_model is not None:
        raise OptionError(
            "TrainStep: num_replicas isn't for steps under torchrun, whose losses are weighted by rank. Write a loop "
            "with the DataParallel, or run in one process."
        )
    if loss is not None and weight is None and model.weight_rule is not None:
        raise OptionError(
            "TrainStep: weight must be passed to the step, which calls it as weight(inputs, *targets), got one of the "
            "DataParallel alone. Pass TrainStep(..., weight=...)."
        )


def _check_trains(model: DataParallel, loss: Any, optimizer: Any) -> None:
    """Refuse an optimizer of another model; a loss, or what is around a frozen model, may be all that is trained."""
    owners = [model.module, *([loss] if isinstance(loss, nn.Module) else [])]
    own = {id(p): p for owner in owners for p in owner.parameters()}
    given = list(all_params(optimizer)) if isinstance(optimizer, Optimizer) else []
    if given and not any(id(p) in own for p in given) and any(p.requires_grad for p in model.module.parameters()):
        raise OptimizerError(
            f"TrainStep: the optimizer must have parameters of the model, got {len(given)} and none of them is one of "
            f"its {sum(1 for _ in model.module.parameters())}. Make the optimizer from this model's parameters."
        )


def own_precision(model: DataParallel, precision: str, check_every: int | None) -> str:
    """Return in which precision a model computes: a sharded model has its own."""
    ranks = model.rank_model
    if not isinstance(ranks, ShardedRankModel):
        return precision
    own = ranks.sharding.precision or "fp32"
    if precision not in ("fp32", own):
        raise OptionError(
            f"TrainStep: precision={precision!r} must be passed to the DataParallel that shards the model, got "
            f"{own!r} there. Pass DataParallel(..., precision='bf16')."
        )
    if check_every is not None:
        raise OptionError("TrainStep: check_every compares copies, and a model that is sharded has none. Leave it.")
    return own


def own_code(model: DataParallel) -> str:
    """Name the methods of ``DataParallel`` that a subclass, or the object, overrides; empty if none."""
    has_forward = type(model).forward is not DataParallel.forward or "forward" in vars(model)
    return " and ".join((*(["forward"] if has_forward else []), *overridden(model)))


def can_capture(model: DataParallel, capture: Any) -> bool:
    """Whether steps may be captured: only where there are CUDA graphs."""
    if not isinstance(capture, bool) and capture != "auto":
        raise OptionError(f"TrainStep: capture must be 'auto', True or False, got {capture!r}.")
    own = own_code(model)
    if capture is True and own:
        raise OptionError(
            f"TrainStep: capture=True needs DataParallel's own methods, got a {type(model).__qualname__} with its own "
            f"{own}. Pass capture='auto'."
        )
    if capture is True and is_sharded(model):
        raise OptionError(
            "TrainStep: capture=True needs whole parameters in one place, and this model is sharded over ranks. "
            "Pass capture='auto'."
        )
    on_gpus = not is_sharded(model) and all(d.type == "cuda" for d in model.replica_devices)
    if capture is True and not on_gpus:
        raise OptionError(
            f"TrainStep: capture=True needs CUDA devices, got {', '.join(str(d) for d in model.replica_devices)}. "
            f"Pass capture='auto'."
        )
    return on_gpus and capture is not False and not own


def make_strategy(model: DataParallel, optimizer: Any, *, captures: bool, checks: bool) -> UpdateStrategy:
    """Choose where gradients are and what applies them, by optimizer and devices.

    ``checks``: each device is to keep copies from step to step.
    """
    num_devices, ranks = len(model.replica_devices), model.rank_model
    own, counts = own_code(model), [num_devices] if ranks is None else ranks.group.gather(num_devices)
    _check_optimizer(model, optimizer, own, counts)
    if ranks is not None and is_sharded(model):
        return FullyShardedUpdate(model, ranks.group, optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        return ShardedUpdate(model, optimizer, fixed=captures)
    is_alone = set(counts) == {1}
    if is_alone and not captures:
        return StockUpdate(model, optimizer)
    reason, level = None, logging.INFO
    if own:
        reason = f"the model has its own {own}"
    elif len(set(counts)) > 1:
        reason, level = f"ranks have {', '.join(map(str, counts))} devices, not all as many", logging.WARNING
    elif not can_shard(optimizer):
        reason = f"{type(optimizer).__name__} can't be spread"
    if reason is not None:
        logger.log(level, "TrainStep: %s, so the optimizer steps on %s.", reason, model.replica_devices[0])
        return StockUpdate(model, optimizer)
    sharded = ShardedOptimizer.of(optimizer, model.replica_devices)
    may_return = captures and not checks and not model.replicas_per_device  # whose chunks the norm is made of
    return ShardedUpdate(model, sharded, fixed=captures, may_return=may_return)


def _check_optimizer(model: DataParallel, optimizer: Any, own: str, counts: list[int]) -> None:
    if not isinstance(optimizer, (Optimizer, ShardedOptimizer)):
        raise OptimizerError(
            f"TrainStep: needs a torch optimizer or a ShardedOptimizer, got {type(optimizer).__qualname__}. "
            f"Pass for instance torch.optim.AdamW(model.parameters())."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "TrainStep: the optimizer must step without a closure, got LBFGS, which evaluates the loss several times "
            "in a step. Use DataParallel in an ordinary loop."
        )
    if not isinstance(optimizer, ShardedOptimizer):
        return
    if is_sharded(model):
        raise OptimizerError(
            "TrainStep: a model that is sharded over ranks has its optimizer's states sharded as well, got a "
            "ShardedOptimizer. Pass the optimizer that it was made from."
        )
    if own and len(model.replica_devices) > 1:
        raise OptimizerError(
            f"TrainStep: a {type(model).__qualname__} with its own {own} has its gradients on the first device, "
            f"which takes a torch optimizer, got a ShardedOptimizer. Pass the optimizer that it was made from."
        )
    if len(set(counts)) > 1:
        raise OptimizerError(
            f"TrainStep: all ranks must have as many devices for a ShardedOptimizer, got {counts}. Pass the "
            f"optimizer that it was made from."
        )
