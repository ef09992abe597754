"""The flight recorder of torch's process groups, their store, and the containers in distributed checkpoints."""

import json
from typing import Any

import torch
import torch.distributed


def open_collectives(limit: int = 20) -> list[str]:
    """Describe the last collectives that aren't done, from torch's flight recorder; in public it only writes files."""
    module: Any = getattr(torch._C, "_distributed_c10d", None)
    dumps = (getattr(module, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
    # A build with NCCL has both: the first knows NCCL's collectives, the second gloo's.
    recorded = [entry for dump in dumps if dump for entry in json.loads(dump(True, True)).get("entries", [])]
    # gloo's stay "scheduled", and are retired.
    entries = [e for e in recorded if e.get("state") != "completed" and not e.get("retired")]
    return [_describe(entry) for entry in entries[-limit:]]


def _describe(entry: dict[str, Any]) -> str:
    group = " ".join(map(str, entry.get("process_group", [])))
    sizes = entry.get("input_sizes", [])
    return (
        f"{entry.get('profiling_name')}, number {entry.get('collective_seq_id')} of group {group}, sizes {sizes}, "
        f"{entry.get('state')}"
    )


def default_store() -> Any:
    """Return the store of the process group, for which torch has no public name."""
    return torch.distributed.distributed_c10d._get_default_store()


def unflatten(state: Any, places: Any) -> Any:
    """Put a distributed checkpoint's values where they stood, by name; torch's way back has no public name."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # takes half a second

    return unflatten_state_dict(state, places)
