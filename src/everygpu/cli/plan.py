"""``everygpu plan``: what a model takes of each GPU, before a GPU is rented."""

import os
import sys
from typing import Any

import click

from everygpu.cli.options import Size
from everygpu.cli.output import make_console
from everygpu.errors import OptionError
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
    make = find_function(build)
    import torch

    from everygpu.parallel.fully_sharded.plan import plan_memory

    with torch.device("meta"):
        found = make()
    model, *batches = found if isinstance(found, tuple) else (found,)
    if not isinstance(model, torch.nn.Module) or len(batches) > 1:
        raise OptionError(f"{build} returns {type(found).__qualname__}. Return a torch.nn.Module, or (model, batch).")
    run = (lambda module: _call(module, batches[0])) if batches else None
    needs = plan_memory(model.to("meta"), run, num_gpus, precision)
    limit, console = parse_size(memory), make_console()
    width = max(len(need.way) for need in needs)
    console.out(f"{sum(p.numel() for p in model.parameters()):,} parameters, {num_gpus} GPUs of {memory}, {precision}")
    console.out(f"{'':{width}}" + "".join(f"{name:>13}" for name in _COLUMNS))
    for need in needs:
        values = need.parameters, need.gradients, need.states, need.whole, need.activations, need.total
        fits = "fits" if need.total <= limit * 0.95 else "tight" if need.total <= limit else "too large"
        console.out(f"{need.way:{width}}" + "".join(f"{format_size(v):>13}" for v in values) + f"  {fits}")
    if run is None:
        console.out("Activations aren't counted: have the function return (model, batch).")


def _call(module: Any, batch: Any) -> Any:
    """Call a model on a batch, on the meta device."""
    from everygpu.tree import map_leaves

    batch = map_leaves(lambda x: x.to("meta") if hasattr(x, "to") else x, batch)
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple) else module(batch)
