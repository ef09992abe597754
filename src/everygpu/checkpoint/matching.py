"""Whether a saved position is one in this data."""

import zlib
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from everygpu.checkpoint.generators import generator_state, state_kind
from everygpu.checkpoint.loaders import check_order, generators_of, length_of
from everygpu.errors import CheckpointMismatchError


def describe_data(loader: Any) -> dict[str, int | None]:
    """Return what has to be the same for a pass to go on, where it is known."""
    return {"length": length_of(loader), "num_rows": length_of(loader.dataset), "batch_size": loader.batch_size}


def check_position(state: Any, loader: Any, generators: Sequence[Any], *, of_part: bool) -> None:
    """Refuse what is no position, or one in other data; see ``ResumableLoader.load_state_dict``.

    Args:
        state: As saved.
        loader: To be put there.
        generators: That its order may come from.
        of_part: The loader has this rank's own rows; what was saved is rank 0's position, and parts may differ.
    """
    try:
        saved, is_position = state["start"]["generators"], state["epoch"] >= 0 and state["num_batches"] >= 0
        kinds = [state_kind(x) for x in saved]
        is_position = is_position and "length" in state
    except (LookupError, TypeError):
        is_position = False
    if not is_position:
        raise CheckpointMismatchError(
            f"load: the data's position must be what ResumableLoader.state_dict returned, got {state!r:.200}. "
            f"Load what was saved from a Feeder into a Feeder, and what was saved from a loader into a loader."
        )
    if state["num_batches"]:
        if not of_part:
            _check_data(state, describe_data(loader))
        check_order(state.get("in_order"), loader)
    # Earlier versions kept torch's alone, where it was called `generator`, and no number of rows.
    is_earlier = "num_rows" not in state
    _check_generators(kinds, generators[: len(generators_of(loader))] if is_earlier else generators)
    if state["num_batches"] and "global" not in state["start"]:
        raise CheckpointMismatchError(
            "load: a position in the middle of a pass needs the random states from its beginning, got none: the "
            "DataLoader's own __iter__ asks its sampler for no indices. Save between two passes, or use a DataLoader "
            "without an __iter__ of its own."
        )


def frozen(indices: Any) -> Any:
    """Return what stays as it is: samplers may use their list again. An empty tuple stands for what isn't compared."""
    return tuple(indices) if isinstance(indices, (list, tuple)) else (indices,) if isinstance(indices, int) else ()


def digest_of(indices: Sequence[Any]) -> int | None:
    """Return the CRC-32 of a batch's indices as a list in text; None where they are no whole numbers."""
    try:
        return zlib.crc32(str([index(i) for i in indices]).encode()) if indices else None
    except TypeError:
        return None


def check_drawn_again(used: Iterable[Any], digest: int | None) -> None:
    """Refuse to go on with the rest of an order that was not the one before.

    Args:
        used: The last batch of indices that is skipped, drawn again.
        digest: What it was before, where that is known.
    Raises:
        CheckpointMismatchError: it is another one.
    """
    for again in used:
        now = digest_of(frozen(again))
        if None not in (digest, now) and digest != now:
            raise CheckpointMismatchError(
                "load: the sampler must draw the same order again in the middle of a pass, got other indices, which "
                "would repeat samples and leave others out. Have it draw the whole order as the pass begins, or from a "
                "torch.Generator that is an attribute of it; use the same dataset; or leave the position out."
            )


def _check_data(state: dict[str, Any], now: dict[str, int | None]) -> None:
    words = {"length": "as many batches", "num_rows": "as many rows", "batch_size": "the same batch_size"}
    for name, value in now.items():
        before = state.get(name, value)
        is_given_otherwise = name == "batch_size" and None in (before, value)  # by a batch sampler
        if before != value and not is_given_otherwise:
            raise CheckpointMismatchError(
                f"load: in the middle of a pass the data must have {words[name]} as when it was saved, {before}, "
                f"got {value}. Use the same dataset and batch size, or leave the position out."
            )


def _check_generators(saved: list[str], generators: Sequence[Any]) -> None:
    kinds = [state_kind(generator_state(g)) for g in generators]
    if saved != kinds:
        raise CheckpointMismatchError(
            f"load: the order must be drawn from as many generators as when it was saved, {len(saved)} "
            f"({', '.join(saved) or 'none'}), got {len(kinds)} ({', '.join(kinds) or 'none'}). Give the DataLoader and "
            f"its sampler the same generators, or leave the position out."
        )
