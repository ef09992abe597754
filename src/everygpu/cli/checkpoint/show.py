"""``everygpu checkpoint show``: a checkpoint's content, as a tree of modules or as JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.tree import Tree

from everygpu.cli.output import UserPath, harmless, make_console, plain
from everygpu.units import format_size

if TYPE_CHECKING:  # the help doesn't wait for torch
    from torch import Tensor

    from everygpu.checkpoint.parts import Contents

_MAX_TEXT = 60


@dataclass(slots=True, kw_only=True)
class Node:
    """A module: what is in it and in the modules inside."""

    children: dict[str, "Node"] = field(default_factory=dict)
    tensors: "dict[str, Tensor]" = field(default_factory=dict)
    num_tensors: int = 0
    num_values: int = 0
    size_bytes: int = 0


@click.command("show")
@click.argument("path", type=UserPath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON: sizes in bytes, every tensor.")
@click.option("--depth", type=click.IntRange(min=0), metavar="N", help="Show modules down to this depth only.")
@click.option("--section", metavar="NAME", help="The state dict to show, where the file has several.")
def show_checkpoint(path: Path, as_json: bool, depth: int | None, section: str | None) -> None:
    """Show the tensors in a checkpoint."""
    from everygpu.checkpoint.load import read_any

    contents = read_any(path, section=section)
    console = make_console(10_000)
    if as_json:
        console.out(json.dumps(describe(path, contents), indent=2))
        return
    for line in summarise(contents):
        console.print(plain(line))
    tensors = tensors_of(contents)
    if tensors:
        console.print(build_tree(grow(tensors), path.name, depth))


def tensors_of(contents: "Contents") -> "dict[str, Tensor]":
    """Return the model's tensors; none where there is no model."""
    from torch import Tensor

    model = contents.parts.get("model")
    values = {} if model is None else model.state["values"]
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def grow(tensors: "Mapping[str, Tensor]") -> Node:
    """Sort tensors into the modules their names tell of, and add up."""
    from everygpu.checkpoint.values import identity

    root = Node()
    seen: set[object] = set()  # a tensor with several names counts once
    for name, tensor in tensors.items():
        *modules, last = name.split(".")
        memory = identity(tensor)
        size = 0 if memory in seen else _size(tensor)
        seen.add(memory)
        node = root
        for module in (None, *modules):
            node = node if module is None else node.children.setdefault(module, Node())
            node.num_tensors += 1
            node.num_values += tensor.numel()
            node.size_bytes += size
        node.tensors[last] = tensor
    return root


def build_tree(root: Node, name: str, depth: int | None) -> Tree:
    """Lay a tree of modules out for a terminal."""
    tree = Tree(plain(f"{name}  {_totals(root)}"))
    _add(tree, root, depth)
    return tree


def summarise(contents: "Contents") -> Iterable[str]:
    """Yield the lines above the tree."""
    from everygpu.checkpoint.parts import is_optimizer_state

    yield f"format: {contents.format}"
    if contents.libraries:
        yield "written with: " + ", ".join(f"{name} {version}" for name, version in contents.libraries.items())
    if contents.section:
        yield f"model: under {contents.section!r}"
    if "model" not in contents.parts:
        yield f"no model: {contents.why_no_model}"
    if contents.step is not None:
        yield f"step: {contents.step}"
    for name, value in _others(contents).items():
        yield f"{name}: {_describe_optimizer(value) if is_optimizer_state(value) else _brief(value)}"
    for note in contents.notes:
        yield f"note: {note}"


def describe(path: Path, contents: "Contents") -> dict[str, Any]:
    """Make a record for JSON."""
    root = grow(tensors_of(contents))
    return {
        "path": str(path),
        "format": contents.format,
        "libraries": dict(contents.libraries),
        "section": contents.section,
        "num_tensors": root.num_tensors,
        "num_values": root.num_values,
        "size_bytes": root.size_bytes,
        "tensors": [
            {"name": name, "dtype": _dtype(tensor), "shape": list(tensor.shape), "size_bytes": _size(tensor)}
            for name, tensor in tensors_of(contents).items()
        ],
        "step": contents.step,
        "parts": {name: _as_json(value) for name, value in _others(contents).items()},
        "notes": list(contents.notes),
    }


def _others(contents: "Contents") -> dict[str, Any]:
    parts = {name: part for name, part in contents.parts.items() if name != "model"} | dict(contents.extras)
    return {name: part.state["values"] if part.kind == "module" else part.state for name, part in parts.items()}


def _add(tree: Tree, node: Node, depth: int | None) -> None:
    if depth == 0:
        return
    for name, tensor in node.tensors.items():
        tree.add(plain(f"{name}  {_dtype(tensor)} {tuple(tensor.shape)}  {format_size(_size(tensor))}"))
    for name, child in node.children.items():
        _add(tree.add(plain(f"{name}  {_totals(child)}")), child, None if depth is None else depth - 1)


def _totals(node: Node) -> str:
    tensors = "1 tensor" if node.num_tensors == 1 else f"{node.num_tensors} tensors"
    return f"{tensors}, {node.num_values:,} values, {format_size(node.size_bytes)}"


def _size(tensor: "Tensor") -> int:
    return tensor.numel() * tensor.element_size()


def _dtype(tensor: "Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe_optimizer(state: Mapping[str, Any]) -> str:
    groups = state["param_groups"]
    rates = sorted({str(group["lr"]) for group in groups if isinstance(group, Mapping) and "lr" in group})
    rate = f", lr {', '.join(rates)}" if rates else ""
    return f"{len(groups)} group{'s' if len(groups) != 1 else ''}, state of {len(state['state'])} parameters{rate}"


def _brief(value: Any) -> str:
    from torch import Tensor

    if isinstance(value, Tensor):
        return f"{_dtype(value)} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{len(value)} entries: {', '.join(map(str, value))}"[:_MAX_TEXT]
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _as_json(value: Any) -> Any:
    is_plain = value is None or isinstance(value, bool | int | str)
    return value if is_plain else harmless(_brief(value))
