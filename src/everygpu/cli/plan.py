"""``everygpu plan``: what a model takes of each GPU, before a GPU is rented."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from everygpu.cli.options import Size
from everygpu.cli.output import make_console
from everygpu.cli.script import show_error
from everygpu.errors import EveryGPUError, OptionError
from everygpu.exit_codes import OTHER
from everygpu.named import find_function
from everygpu.units import format_size, parse_size

_COLUMNS = ("parameters", "gradients", "states", "whole", "activations", "sum")


@click.command("plan")
@click.argument("build", metavar="FILE.py:FUNCTION")
@click.option("--gpus", "num_gpus", type=click.IntRange(min=1), required=True, metavar="N", help="Number of GPUs.")
@click.option("--memory", type=Size(), required=True, metavar="SIZE", help="Memory of one GPU, such as 80GB.")
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
def plan_model(build: str, num_gpus: int, memory: str, precision: str) -> None:
    """Count the memory that a model takes of each GPU, on a machine without one.

    The function takes no arguments, and returns the model; or (model, batch), with a batch for one GPU: a tensor, a
    tuple of arguments or a dict of them. If the model returns no loss, its output counts. It is called with torch's
    default device "meta", where tensors have no memory. States are AdamW's.
    """
    sys.path.insert(0, os.getcwd())
    with _users_code():
        make = find_function(build)
        import torch

        from everygpu.cli.memory_plan import plan_memory

        with torch.device("meta"):
            found = make()
    model, *batches = found if isinstance(found, tuple) else (found,)
    if not isinstance(model, torch.nn.Module) or len(batches) > 1:
        raise OptionError(f"{build} returns {type(found).__qualname__}. Return a torch.nn.Module, or (model, batch).")
    run = (lambda module: _call(module, batches[0])) if batches else None
    with _users_code():
        needs = plan_memory(model.to("meta"), run, num_gpus, precision)
    limit, console = parse_size(memory), make_console()
    console.out(f"{sum(p.numel() for p in model.parameters()):,} parameters, {num_gpus} GPUs of {memory}, {precision}")
    console.out("".join(f"{name:>12}" for name in _COLUMNS))
    for need in needs:
        values = need.parameters, need.gradients, need.states, need.whole, need.activations if run else None, need.total
        console.out(f"{need.way}: {_judge(limit, need.total, is_whole=run is not None)}")
        console.out("".join(f"{format_size(value):>12}" for value in values))
    if run is None:
        console.out("What is left is for activations: have the function return (model, batch) to count them.")


def _judge(limit: int, total: int, *, is_whole: bool) -> str:
    if total > limit:
        return "too large"
    if not is_whole:
        return f"leaves {format_size(limit - total)}"
    return "fits" if total <= limit * 0.95 else "tight"


@contextmanager
def _users_code() -> Iterator[None]:
    """Show errors of the user's own as Python does."""
    try:
        yield
    except EveryGPUError:
        raise
    except Exception as error:  # noqa: BLE001 - the interpreter's place
        show_error(error)
        sys.exit(OTHER)


def _call(module: Any, batch: Any) -> Any:
    """Call a model on a batch, on the meta device."""
    from everygpu.tree import map_leaves

    batch = map_leaves(lambda x: x.to("meta") if hasattr(x, "to") else x, batch)
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple) else module(batch)
