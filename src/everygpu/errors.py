"""Every error that everygpu raises on purpose.

    EveryGPUError
    ├── OptionError (ValueError)              an option has a value outside its range
    ├── DeviceError (RuntimeError)            a device name is wrong, absent, doubled or refused
    ├── ModuleError (TypeError)               the object passed as the module can't be replicated
    ├── PlacementError (RuntimeError)         the module's tensors are spread over several devices
    ├── SplitError (ValueError)               the batch can't be cut into shards
    ├── GatherError (ValueError)              the replicas' outputs can't be joined
    ├── OptimizerError (TypeError)            the object passed as the optimizer can't be used so
    ├── CaptureError (RuntimeError)           a step can't be recorded as a CUDA graph
    ├── CallError (RuntimeError)              a call comes where, or asks for what, the object can't do
    ├── CopyError (TypeError)                 an object that can't be copied or pickled was to be
    ├── LossError (ValueError)                the loss returned no single number; a RuntimeError, too
    ├── NonFiniteError (FloatingPointError)   a loss or gradients are nan or infinite
    ├── ReplicaError (RuntimeError)           names the replica an exception came from
    │   └── DivergedError (RuntimeError)      replicas' parameters differ
    ├── RankError (RuntimeError)              processes that train together differ, or one of them has failed
    ├── WorkerError (RuntimeError)            a process of the loader died
    ├── FeedTimeoutError (TimeoutError)       no batch came in time
    ├── BenchmarkError (RuntimeError)         a way of training can't be measured on this machine
    └── CheckpointError (RuntimeError)
        ├── CheckpointNotFoundError (FileNotFoundError)
        ├── CheckpointDamagedError (ValueError)    truncated, altered or incomplete
        ├── CheckpointForeignError (ValueError)    not written by everygpu, or by a newer format
        ├── CheckpointContentError (TypeError)     a value that has no place in a checkpoint
        ├── CheckpointBusyError (BlockingIOError)  another saver holds the path
        └── CheckpointMismatchError (KeyError)     keys or shapes differ from the target's

Each inherits the builtin that callers already catch where torch or Python raises it. Messages read
``<function>: <what is required>, got <value>. <What to do.>``
"""


class EveryGPUError(Exception):
    """Base class of every error that this package raises on purpose.

    Each child inherits a builtin, too, so callers that catch torch's or Python's own error go on to work. Errors of
    the user's model, loss or dataset are not wrapped: they reach the caller with their own type.

    ::

        try:
            everygpu.load("run/checkpoint", model=model)
        except everygpu.EveryGPUError as error:  # here also a RuntimeError
            print(error)  # <function>: <what is required>, got <value>. <What to do.>

    Source:
        The tree of errors is drawn in ``everygpu.errors``.
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
    """A step can't be recorded as a CUDA graph. Under ``capture="auto"`` it is the logged reason, not raised."""


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
    """Another saver, in this process or another, holds the lock of the same path."""


class CheckpointMismatchError(CheckpointError, KeyError):
    """Keys or shapes in the checkpoint differ from those of the target."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; the message has several lines.
        return str(self.args[0]) if self.args else ""
