"""The fast layer: a whole training step in one call, optimizer state spread over the devices."""

from everygpu.step.sharded_optimizer import ShardedOptimizer
from everygpu.step.train_step import StepStats, TrainStep

__all__ = ["ShardedOptimizer", "StepStats", "TrainStep"]
