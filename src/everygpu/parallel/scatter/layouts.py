"""Tensors that aren't dense: what of them can be cut along the rows, and what is said of the others."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from everygpu import tree
from everygpu.errors import SplitError
from everygpu.parallel.scatter.batch_types import open_batch


def cut_rows(x: Tensor, rows: Sequence[int], dim: int) -> list[Tensor]:
    """Cut a tensor into parts of so many rows: views, but of a sparse tensor copies."""
    ends = itertools.accumulate(rows)
    if x.layout is torch.sparse_coo and not x.requires_grad:
        return [torch.narrow_copy(x, dim % x.ndim, end - num_rows, num_rows) for end, num_rows in zip(ends, rows)]
    # Not torch.split, whose results must not be written when there is a graph.
    return [x.narrow(dim, end - num_rows, num_rows) for end, num_rows in zip(ends, rows)]


def explain_layout(named: Sequence[tuple[str, object]], error: RuntimeError) -> None:
    """Name the argument for which torch has no way to cut it, or to send it to a device.

    Raises:
        SplitError: there is one; from the error that torch raised.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return
    for name, value in named:
        for path, leaf in tree.leaves(value, name, open_batch):
            found = _unusual(leaf) if isinstance(leaf, Tensor) and not leaf.is_nested else None
            if found is not None:
                what, advice = found
                raise SplitError(
                    f"scatter: tensors must have rows that torch can cut, got a {what} tensor of shape "
                    f"{tuple(leaf.shape)} in {path}. {advice}"
                ) from error


def _unusual(x: Tensor) -> tuple[str, str] | None:
    """Say what a tensor is that can't be cut, and what to pass instead."""
    if x.is_meta:
        return "meta", "It has no values: make it on a device."
    if x.layout is torch.sparse_coo:
        return ("sparse_coo", "Pass x.to_dense(), or one that takes no gradient.") if x.requires_grad else None
    if x.layout is not torch.strided:
        what = str(x.layout).removeprefix("torch.").removeprefix("_")
        return what, f"Pass x.to_dense(){'' if what == 'mkldnn' else ', or x.to_sparse_coo() if it takes no gradient'}."
    if x.is_quantized:
        return "quantized", "Pass x.dequantize(), or one that is quantized per tensor."
    return None
