"""How many replicas each device runs, where results are to depend on their number alone."""

from typing import Any

from everygpu.errors import OptionError


def check_num_replicas(num_replicas: Any, *, split: Any, shard: Any, engine: Any, has_ranks: bool) -> None:
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
        "several processes. Leave it out under torchrun, or run the script by python": has_ranks,
    }
    for reason, is_found in reasons.items():
        if is_found:
            raise OptionError(f"DataParallel: num_replicas={num_replicas} goes with no {reason}.")


def share_replicas(num_replicas: int, num_devices: int) -> int:
    """Return how many replicas each device runs: a part of the tree by which gradients are added up."""
    fits = [n for n in range(1, num_replicas + 1) if _is_part(num_replicas, n)]
    if num_devices in fits:
        return num_replicas // num_devices
    below = num_replicas // num_devices * num_devices
    near = " or ".join(str(n) for n in (below, below + num_devices) if n and _is_part(n, num_devices))
    raise OptionError(
        f"DataParallel: {num_devices} devices can't share {num_replicas} replicas alike, a power of two each. Pass "
        f"num_replicas={near or num_devices}, or a number of devices that fits {num_replicas}: "
        f"{', '.join(map(str, fits))}."
    )


def _is_part(num_replicas: int, num_devices: int) -> bool:
    share, rest = divmod(num_replicas, num_devices)
    return rest == 0 and (num_devices == 1 or share.bit_count() == 1)
