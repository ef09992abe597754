"""Every error that everygpu raises on purpose.

Each inherits the builtin that callers already catch where torch or Python raises it. A message says what is wrong,
with the value, then what to do.
"""


class EveryGPUError(Exception):
    """Base class of every error that this package raises on purpose.

    Each child also inherits a builtin, so callers that catch torch's or Python's own error continue to work. Errors of
    the user's model, loss or dataset are not wrapped: they reach the caller with their own type.

    ::

        try:
            everygpu.load("run/checkpoint", model=model)
        except everygpu.EveryGPUError as error:  # here also a RuntimeError
            print(error)  # what is wrong, and what to do
    """


class OptionError(EveryGPUError, ValueError):
    """An option has a value outside its range."""


class DeviceError(EveryGPUError, RuntimeError):
    """A device is unknown, absent, named twice, or fails what was asked of it."""


class ModuleError(EveryGPUError, TypeError):
    """The object passed as the module can't be replicated."""


class PlacementError(EveryGPUError, RuntimeError):
    """The module's parameters and buffers are not together on one device."""


class SplitError(EveryGPUError, ValueError):
    """The batch can't be cut into one shard per replica."""


class GatherError(EveryGPUError, ValueError):
    """The replicas' outputs can't be joined into one."""


class OptimizerError(EveryGPUError, TypeError):
    """The object passed as the optimizer, or one of its gradients, can't be used in this way."""


class CaptureError(EveryGPUError, RuntimeError):
    """A step can't be captured as a CUDA graph. Under ``capture="auto"`` it is the logged reason, not raised."""


class CallError(EveryGPUError, RuntimeError):
    """A call comes at a moment, or asks for a result, that the object doesn't support."""


class CopyError(EveryGPUError, TypeError):
    """An object that can't be copied or pickled was asked to be."""


class LossError(EveryGPUError, ValueError, RuntimeError):
    """The loss function, or the model in its place, returned no single number. torch raises RuntimeError."""


class NonFiniteError(EveryGPUError, FloatingPointError):
    """A loss or gradients are nan or infinite; parameters are as before."""


class ReplicaError(EveryGPUError, RuntimeError):
    """Names the replica, device and shards behind an exception, whose ``__cause__`` it is."""


class DivergedError(ReplicaError):
    """Replicas' parameters differ."""


class RankError(EveryGPUError, RuntimeError):
    """Processes that train together don't agree, or one of them has failed."""


class WorkerError(EveryGPUError, RuntimeError):
    """A worker process of the loader died: killed, or by a crash of its own.

    The message names the signal or exit status.
    """


class FeedTimeoutError(EveryGPUError, TimeoutError):
    """The loader had no batch ready in the time it was given."""


class BenchmarkError(EveryGPUError, RuntimeError):
    """A model, or a way to train it, can't be measured on this machine."""


class CheckpointError(EveryGPUError, RuntimeError):
    """Base class of everything that goes wrong with a checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class CheckpointDamagedError(CheckpointError, ValueError):
    """The checkpoint is truncated, altered or incomplete."""


class CheckpointForeignError(CheckpointError, ValueError):
    """The path holds something else than a checkpoint this version can read."""


class CheckpointContentError(CheckpointError, TypeError):
    """A value that was asked to be saved has no place in a checkpoint."""


class CheckpointBusyError(CheckpointError, BlockingIOError):
    """Another saver, in this process or another, is writing to the same path."""


class CheckpointMismatchError(CheckpointError, KeyError):
    """Keys or shapes in the checkpoint differ from those of the target."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; the message has several lines.
        return str(self.args[0]) if self.args else ""
