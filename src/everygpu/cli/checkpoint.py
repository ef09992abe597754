"""``everygpu checkpoint``: look at checkpoints of any format, check and convert them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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
@click.option("--section", metavar="NAME", help="The state dict to show, where the file has several.")
def show_checkpoint(path: Path, as_json: bool, section: str | None) -> None:
    """Show the tensors in a checkpoint."""
    from everygpu.checkpoint.load import read_any

    contents = read_any(path, section=section)
    console = make_console(10_000)
    if as_json:
        console.out(json.dumps(describe(path, contents), indent=2))
        return
    for line in summarise(contents):
        console.print(plain(line))
    if tensors := tensors_of(contents):
        count, num_values, size_bytes = describe_totals(tensors).values()
        console.print(plain(f"tensors: {count}, {num_values:,} values, {format_size(size_bytes)}"))
    for name, tensor in tensors.items():
        console.print(plain(f"{name}  {_dtype(tensor)} {tuple(tensor.shape)}  {format_size(tensor.nbytes)}"))


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


def tensors_of(contents: "Contents") -> "dict[str, Tensor]":
    """Return the model's tensors; none where there is no model."""
    from torch import Tensor

    model = contents.parts.get("model")
    values = {} if model is None else model.state["values"]
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def describe_totals(tensors: "Mapping[str, Tensor]") -> dict[str, int]:
    """Count tensors, values and bytes; memory with several names counts once."""
    from everygpu.checkpoint.values import identity

    sizes = {identity(tensor): tensor.nbytes for tensor in tensors.values()}
    num_values = sum(tensor.numel() for tensor in tensors.values())
    return {"num_tensors": len(tensors), "num_values": num_values, "size_bytes": sum(sizes.values())}


def summarise(contents: "Contents") -> Iterable[str]:
    """Yield the lines above the tensors."""
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
    tensors, others = tensors_of(contents), _others(contents)
    return {
        "path": str(path),
        "format": contents.format,
        "libraries": dict(contents.libraries),
        "section": contents.section,
        **describe_totals(tensors),
        "tensors": [
            {"name": name, "dtype": _dtype(tensor), "shape": list(tensor.shape), "size_bytes": tensor.nbytes}
            for name, tensor in tensors.items()
        ],
        "step": contents.step,
        "parts": {name: x if isinstance(x, int | str | None) else harmless(_brief(x)) for name, x in others.items()},
        "notes": list(contents.notes),
    }


def _others(contents: "Contents") -> dict[str, Any]:
    parts = {name: part for name, part in contents.parts.items() if name != "model"} | dict(contents.extras)
    return {name: part.state["values"] if part.kind == "module" else part.state for name, part in parts.items()}


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
