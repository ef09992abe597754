"""Hand over to torchrun, which starts the processes, on one machine or several."""

import os
from collections.abc import Mapping, Sequence

from everygpu.exit_codes import STOPPED

OPTIONS = (
    "--event-log-handler", "--local-addr", "--local-ranks-filter", "--log-dir", "--logs-specs", "--master-addr",
    "--master-port", "--max-restarts", "--monitor-interval", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-conf",
    "--rdzv-endpoint", "--rdzv-id", "--redirects", "--role", "--signals-to-handle", "--start-method", "--tee",
)  # fmt: skip
"""torchrun's options with a value, as its own ``--help`` explains them."""
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def torchrun_arguments(
    num_processes: int, options: Mapping[str, str], script: str, args: Sequence[str], is_module: bool = False
) -> list[str]:
    """Write torchrun's command line. Without ``--nnodes`` this machine is alone; else processes meet by its c10d."""
    options = dict(options)
    if "--nnodes" in options and "--master-addr" not in options:
        options = {"--rdzv-backend": "c10d", "--rdzv-id": os.path.basename(script), **options}
    alone = [] if "--nnodes" in options else ["--standalone"]
    written = [text for name, value in {"--signals-to-handle": _SIGNALS, **options}.items() for text in (name, value)]
    module = ["--module"] if is_module else []
    return [*alone, "--nproc-per-node", str(num_processes), *written, *module, script, *args]


def launch(arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run torchrun in this process, which holds what it has reserved.

    Returns:
        The exit code of the process that failed first, 128 and the signal if one ended it or us, or 0; and a
        line that says which it was.
    Source:
        ``torch.distributed.run.main``, which is the ``torchrun`` command.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        return code if code >= 0 else 128 - code, f"process {rank} ended with exit code {code}."
    except SignalException as error:
        name = error.sigval.name
        code = STOPPED if name == "SIGUSR1" else 128 + int(error.sigval)  # as a CheckpointManager takes it
        return code, f"stopped by {name}; so were the processes."
    return 0, None
