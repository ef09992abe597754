"""Around the training loop: data to the devices, numbers back, and the sizes that fit.

1. Every batch comes once and in order, on its devices before it is needed, split as the model splits it.
2. The seed and the epoch's number determine an epoch's order; ``set_epoch`` is called wherever there is one.
3. A resumed run sees what would have come next, with other workers, replicas or ranks, or is refused with the reason.
4. The user's loader and random generators stay as they were.
5. However a loop ends, its thread and workers end. A worker that dies or never starts is a typed error, not a hang.
6. The batch is the whole run's: each rank reads its own rows, and all ranks take the same number of steps.
7. `Meter` averages over rows and ranks without keeping a graph or waiting for a device.
8. `tune_workers` and `find_batch_size` measure the user's own program, and restore what it changed.
"""

from everygpu.feed.feeder import Feeder
from everygpu.feed.meter import Meter
from everygpu.feed.tune import find_batch_size, tune_workers

__all__ = ["Feeder", "Meter", "find_batch_size", "tune_workers"]
