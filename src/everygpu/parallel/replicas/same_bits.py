"""How many replicas each device runs, where results are to depend on their number alone."""

from typing import Any

from torch import nn

from everygpu.errors import OptionError
from everygpu.parallel.batch_norm import SyncBatchNorm


def check_num_replicas(
    num_replicas: Any, *, split: Any, shard: Any, engine: Any, buffers: Any, num_ranks: int, module: nn.Module
) -> None:
    """Refuse what is no number of replicas, and options by which results would depend on the devices."""
    if num_replicas is None:
        return
    if not isinstance(num_replicas, int) or isinstance(num_replicas, bool) or num_replicas < 1:
        raise OptionError(
            f"DataParallel: num_replicas must be a whole number of 1 or more, or None for one replica per device, got "
            f"{num_replicas!r}."
        )
    reasons = {
        f"split={split!r}, which cuts batches by devices. Leave it out, or pass split='even'": split
        not in (None, "chunk", "even"),
        f"shard={shard!r}, which shards parameters by devices. Leave one of them out": shard is not None,
        f"engine={engine!r}: compiled replicas are one per device. Leave it out": engine == "compile",
    }
    if num_ranks > 1:
        has_synced = any(isinstance(m, SyncBatchNorm) for m in module.modules())
        reasons |= {
            f"engine={engine!r} under torchrun. Leave it out": engine not in ("auto", "threads"),
            f"buffers={buffers!r} under torchrun, which averages those of each rank. Leave it out": buffers != "first",
            "SyncBatchNorm under torchrun, which sums over each rank first. Run in one process": has_synced,
        }
    for reason, is_found in reasons.items():
        if is_found:
            raise OptionError(f"DataParallel: num_replicas={num_replicas} goes with no {reason}.")


def share_replicas(num_replicas: int, num_devices: int, num_ranks: int = 1) -> int:
    """Return how many replicas each of a rank's devices runs: a part of the tree by which gradients are added up."""
    fits = [n for n in range(1, num_replicas + 1) if _is_part(num_replicas, n)]
    everywhere = num_devices * num_ranks
    # Gradients are divided by the number of ranks, which a power of two leaves exact.
    if everywhere in fits and _is_part(num_replicas, num_ranks) and num_ranks.bit_count() == 1:
        return num_replicas // everywhere
    below = num_replicas // everywhere * everywhere
    near = " or ".join(str(n) for n in (below, below + everywhere) if n and _is_part(n, everywhere))
    ranks = f" of {num_ranks} ranks, a power of two," if num_ranks > 1 else ""
    raise OptionError(
        f"DataParallel: {everywhere} devices{ranks} can't share {num_replicas} replicas alike, a power of two each. "
        f"Pass num_replicas={near or everywhere}, or a number of devices that fits {num_replicas}: "
        f"{', '.join(map(str, fits))}."
    )


def _is_part(num_replicas: int, num_parts: int) -> bool:
    share, rest = divmod(num_replicas, num_parts)
    return rest == 0 and (num_parts == 1 or share.bit_count() == 1)
