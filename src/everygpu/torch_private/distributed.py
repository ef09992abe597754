"""The store of torch's process groups, and the containers in distributed checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed


def default_store() -> Any:
    """Return the store of the process group, for which torch has no public name."""
    return torch.distributed.distributed_c10d._get_default_store()


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Have a process group of which this process is rank 0, and the others aren't there: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its backend has no public name

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def unflatten(state: Any, places: Any) -> Any:
    """Put a distributed checkpoint's values where they stood, by name; torch's way back has no public name."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # takes half a second

    return unflatten_state_dict(state, places)
