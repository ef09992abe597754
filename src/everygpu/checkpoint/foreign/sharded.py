"""A model spread over several files, with a JSON index that says which tensor is where."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from everygpu.checkpoint.brief import brief
from everygpu.checkpoint.foreign.faults import broken, refused
from everygpu.checkpoint.foreign.formats import is_plain_name
from everygpu.checkpoint.manifest import read_json

_WEIGHT_MAP = "weight_map"


def read_weight_map(path: Path) -> dict[str, Path]:
    """Read an index such as ``model.safetensors.index.json``.

    Args:
        path: The index; the shards are beside it.
    Returns:
        The file of each tensor, all existing.
    Raises:
        CheckpointForeignError: the file is JSON, but no index.
        CheckpointDamagedError: a shard is missing, or named so that it leads out of the directory.
    Source:
        The sharded checkpoints of Hugging Face: https://huggingface.co/docs/transformers/big_models.
    """
    document = read_json(path)
    weight_map = document.get(_WEIGHT_MAP) if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        raise refused(path, f"JSON without a {_WEIGHT_MAP!r}", "Pass an index of shards, or the weights' own file.")
    shards = {name: _shard(path, name, shard) for name, shard in weight_map.items()}
    missing = sorted({shard.name for shard in shards.values() if not shard.is_file()})
    if missing:
        raise broken(path, f"lists {len(missing)} shards that are not beside it, {missing[0]} for one")
    return shards


def read_shards(path: Path, read: Callable[[Path], Any]) -> dict[str, Tensor]:
    """Read every tensor that an index lists.

    Args:
        path: The index.
        read: Reads one shard: names and tensors.
    Raises:
        CheckpointDamagedError: a shard lacks a tensor that the index puts there.
    """
    shards = read_weight_map(path)
    contents = {shard: read(shard) for shard in sorted(set(shards.values()))}
    return {name: _tensor_in(contents[shard], name, shard) for name, shard in shards.items()}


def _shard(index: Path, name: str, shard: Any) -> Path:
    # A link inside the directory may well lead out of it: that is how the Hugging Face cache stores files. A
    # name must not, for the index comes from the network.
    if not isinstance(shard, str) or not is_plain_name(shard):
        raise broken(index, f"puts {brief(name)} into {brief(shard)}, which is no name of a file beside it")
    return index.parent / shard


def _tensor_in(content: Any, name: str, shard: Path) -> Tensor:
    tensor = content.get(name) if isinstance(content, dict) else None
    if not isinstance(tensor, Tensor):
        raise broken(shard, f"lacks {brief(name)}, which the index puts there")
    return tensor
