"""``everygpu checkpoint``: look at checkpoints of any format, check and convert them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.tree import Tree

from everygpu.cli.output import UserPath, harmless, make_console, plain, show_bar
from everygpu.exit_codes import UNREADABLE
from everygpu.units import format_size

if TYPE_CHECKING:  # the help doesn't wait for torch
    from torch import Tensor

    from everygpu.checkpoint.parts import Contents

_MAX_TEXT = 60


@click.group("checkpoint")
def checkpoint() -> None:
    """Show, verify and convert checkpoints.

    A checkpoint is a directory of everygpu.save, a file of torch.save, a safetensors file, an index of
    shards, or a directory of torch.distributed.checkpoint, Transformers or Accelerate. Nothing in them is
    executed.
    """


@checkpoint.command("show")
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
        root = grow(tensors)
        tree = Tree(plain(f"{path.name}  {_totals(root)}"))
        _add(tree, root, depth)
        console.print(tree)


@checkpoint.command("verify", short_help="Check a checkpoint against its SHA256SUMS, or that it can be read.")
@click.argument("path", type=UserPath(path_type=Path))
@click.pass_context
def verify_checkpoint(context: click.Context, path: Path) -> None:
    """Check a checkpoint against its SHA256SUMS, or that it can be read.

    Exits with 4 when something is wrong with it.
    """
    from everygpu.checkpoint.verify import examine, total_bytes  # not for the help

    with show_bar(f"verifying {path.name}", total_bytes(path)) as count:
        report = examine(path, count)
    console = make_console(10_000)
    for fault in report.faults:
        console.print(plain(fault))
    if report.faults:
        console.print(plain(f"{path}: invalid"))
        context.exit(UNREADABLE)
    files = "1 file" if report.num_files == 1 else f"{report.num_files} files"
    console.print(f"{harmless(path)}: valid ({report.format}; {files}, {format_size(report.size_bytes)})")


@checkpoint.command("convert", short_help="Write the model in SRC to DST, as safetensors or .pt.")
@click.argument("source", metavar="SRC", type=UserPath(path_type=Path))
@click.argument("destination", metavar="DST", type=UserPath(path_type=Path))
@click.option("--section", metavar="NAME", help="The state dict to take, where the source has several.")
@click.option("--strip-prefix", default="", metavar="TEXT", help="Take this off names that begin with it.")
@click.option("--overwrite", is_flag=True, help="Replace the file at DST.")
def convert_checkpoint(
    source: Path, destination: Path, section: str | None, strip_prefix: str, overwrite: bool
) -> None:
    """Write the model in SRC to DST, whose name ends with .pt, .pth, .ckpt, .bin or .safetensors.

    What is at DST is replaced when the new file is complete.
    """
    from everygpu.checkpoint.convert import convert  # not for the help

    with show_bar(f"converting {source.name}"):
        outcome = convert(source, destination, section=section, strip_prefix=strip_prefix, overwrite=overwrite)
    console = make_console(10_000)
    console.print(plain(f"{destination}: {outcome.num_tensors} tensors ({outcome.format})"))
    if outcome.left_out:
        console.print(plain(f"left out: {', '.join(outcome.left_out)}"))
    for note in outcome.notes:
        console.print(plain(f"note: {note}"))


@dataclass(slots=True, kw_only=True)
class Node:
    """A module: what is in it and in the modules inside."""

    children: dict[str, "Node"] = field(default_factory=dict)
    tensors: "dict[str, Tensor]" = field(default_factory=dict)
    num_tensors: int = 0
    num_values: int = 0
    size_bytes: int = 0


def tensors_of(contents: "Contents") -> "dict[str, Tensor]":
    """Return the model's tensors; none where there is no model."""
    from torch import Tensor

    model = contents.parts.get("model")
    values = {} if model is None else model.state["values"]
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def grow(tensors: "Mapping[str, Tensor]") -> Node:
    """Group tensors by the modules in their names, and sum their sizes."""
    from everygpu.checkpoint.values import identity

    root = Node()
    seen: set[object] = set()  # a tensor with several names counts once
    for name, tensor in tensors.items():
        *modules, last = name.split(".")
        memory = identity(tensor)
        size = 0 if memory in seen else tensor.nbytes
        seen.add(memory)
        node = root
        for module in (None, *modules):
            node = node if module is None else node.children.setdefault(module, Node())
            node.num_tensors += 1
            node.num_values += tensor.numel()
            node.size_bytes += size
        node.tensors[last] = tensor
    return root


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
    root, others = grow(tensors_of(contents)), _others(contents)
    return {
        "path": str(path),
        "format": contents.format,
        "libraries": dict(contents.libraries),
        "section": contents.section,
        "num_tensors": root.num_tensors,
        "num_values": root.num_values,
        "size_bytes": root.size_bytes,
        "tensors": [
            {"name": name, "dtype": _dtype(tensor), "shape": list(tensor.shape), "size_bytes": tensor.nbytes}
            for name, tensor in tensors_of(contents).items()
        ],
        "step": contents.step,
        "parts": {name: x if isinstance(x, int | str | None) else harmless(_brief(x)) for name, x in others.items()},
        "notes": list(contents.notes),
    }


def _others(contents: "Contents") -> dict[str, Any]:
    parts = {name: part for name, part in contents.parts.items() if name != "model"} | dict(contents.extras)
    return {name: part.state["values"] if part.kind == "module" else part.state for name, part in parts.items()}


def _add(tree: Tree, node: Node, depth: int | None) -> None:
    if depth == 0:
        return
    for name, tensor in node.tensors.items():
        tree.add(plain(f"{name}  {_dtype(tensor)} {tuple(tensor.shape)}  {format_size(tensor.nbytes)}"))
    for name, child in node.children.items():
        _add(tree.add(plain(f"{name}  {_totals(child)}")), child, None if depth is None else depth - 1)


def _totals(node: Node) -> str:
    tensors = "1 tensor" if node.num_tensors == 1 else f"{node.num_tensors} tensors"
    return f"{tensors}, {node.num_values:,} values, {format_size(node.size_bytes)}"


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
