"""Hand over to torchrun: one process per GPU or per box, on one box or several."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everygpu.exit_codes import STOPPED

_HANDLED_VARIABLE = "PET_SIGNALS_TO_HANDLE"
"""The default of torchrun's ``--signals-to-handle``: signals that it passes on to the processes, and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How many processes there are, and where they meet."""

    num_processes: int
    """On this box."""
    nnodes: str | None = None
    """As torchrun's ``--nnodes``: ``"2"`` or ``"1:4"``; None for this box alone."""
    rdzv_endpoint: str | None = None
    """As torchrun's ``--rdzv-endpoint``: host and port at which the boxes meet."""
    passed_on: tuple[str, ...] = ()
    """Options that torchrun takes as they are."""
    is_module: bool = False
    """Whether the script is named as for ``python -m``."""

    def arguments(self, script: str, args: Sequence[str]) -> list[str]:
        """Write torchrun's command line."""
        if self.nnodes is None:
            meeting = ["--standalone"]
        else:
            meeting = ["--nnodes", self.nnodes, "--rdzv-backend", "c10d"]
            meeting += ["--rdzv-endpoint", self.rdzv_endpoint or "", "--rdzv-id", os.path.basename(script)]
        module = ["--module"] if self.is_module else []
        return [*meeting, "--nproc-per-node", str(self.num_processes), *self.passed_on, *module, script, *args]


def pass_on(options: Mapping[str, str | None]) -> tuple[str, ...]:
    """Write options of torchrun's, those that are given."""
    return tuple(text for name, value in options.items() if value is not None for text in (name, value))


def launch(plan: Launch, script: str, args: Sequence[str]) -> tuple[int, str | None]:
    """Run a script in several processes; this one waits for them, and holds what it has reserved.

    Args:
        plan: How many, and where.
        script: Path of the file.
        args: What follows it in ``sys.argv`` of each.
    Returns:
        The exit code of the process that failed first, 128 and the signal if one ended it or us, or 0; and a
        line that says which it was.
    Source:
        ``torch.distributed.run.main``, which is the ``torchrun`` command.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault(_HANDLED_VARIABLE, "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    try:
        run.main(plan.arguments(script, args))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _shell_code(failure.exitcode), f"process {rank} ended with exit code {failure.exitcode}."
    except SignalException as error:
        name = error.sigval.name
        code = STOPPED if name == "SIGUSR1" else 128 + int(error.sigval)  # as a CheckpointManager takes it
        return code, f"stopped by {name}; so were the processes."
    return 0, None


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code
