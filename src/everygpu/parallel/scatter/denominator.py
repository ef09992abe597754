"""What a loss is the mean of: autograd's node of it knows, where torch has computed it."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from everygpu import comm, tree
from everygpu.parallel.sharded.batch import ShardedBatch
from everygpu.parallel.sharded.layout import DeviceWeights
from everygpu.torch_private.core import NllLoss, nll_loss_of, num_dispatch_modes

logger = logging.getLogger("everygpu")

IGNORED = -100
"""Torch's own ``ignore_index``."""
_SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
_COUNTED = "everygpu_counted"
_SAME_VALUE = (
    *("AliasBackward0", "CloneBackward0", "ReshapeAliasBackward0", "ToCopyBackward0", "UnsafeViewBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0", "ViewBackward0"),
)
"""Autograd's nodes of what leaves a single number as it is."""
_MOST_NODES = 64


def denominator_of(x: Tensor) -> Tensor | None:
    """Return what torch's ``cross_entropy`` or ``nll_loss`` has divided a loss by, shape (); None for other numbers."""
    if isinstance(x, ShardedBatch):
        weights = x._layout.weights
        return weights.tensor.sum() if isinstance(weights, DeviceWeights) else None
    node, place = x.grad_fn, x.output_nr
    if node is None or x._version:  # written to without a graph
        return None
    while node is not None and x.numel() == 1:
        noted: dict[int, Tensor] | None = _notes_of(node).get(_COUNTED)
        if noted is not None:
            return noted.get(place)
        loss = nll_loss_of(node)
        if loss is not None:
            if not loss.is_mean:
                return None
            is_exact = loss.total_weight.dtype in (torch.float32, torch.float64)
            total = loss.total_weight.detach() if is_exact else count_kept(loss.target, loss.ignore_index, loss.weight)
            note_denominator(x, total)
            return total
        node, place = node.next_functions[0] if node.name() in _SAME_VALUE else (None, 0)
    return None


def note_denominator(x: Tensor, total: Tensor) -> None:
    """Note the denominator of a mean for ``denominator_of``; a write in place makes it unknown."""
    _notes_of(x.grad_fn).setdefault(_COUNTED, {})[x.output_nr] = total


def _notes_of(node: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = node.metadata  # which torch declares as a method
    return found


def count_kept(target: Tensor, ignore_index: int, classes: Tensor | None = None) -> Tensor:
    """Count the targets that aren't ignored, by their classes' weights."""
    target = target.long()  # a byte is never -100
    is_counted = torch.ne(target, ignore_index)
    if classes is None:
        return is_counted.sum()
    return torch.where(is_counted, classes[torch.where(is_counted, target, 0)], 0).sum()


def are_classes(x: Any) -> bool:
    return isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.is_nested)


@contextmanager
def seeing_losses(modules: Sequence[Any]) -> Iterator[None]:
    """Make ``transformers``' loss functions build a graph where models have none, for ``denominator_of``."""
    library = sys.modules.get("transformers.loss.loss_utils")
    if library is None or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        yield
        return
    known = list(library.LOSS_MAPPING.values())
    inner: list[Any] = [m for module in modules if isinstance(module, nn.Module) for m in module.modules()]
    with ExitStack() as undo:
        for m in [m for m in inner if hasattr(type(m), "loss_function")]:
            if (function := m.loss_function) in known:
                own, before = vars(m), dict(vars(m))
                m.loss_function = partial(_call_with_graph, function)  # a property of its class, which sets another
                written = {name for name in own if own[name] is not before.get(name)}
                undo.callback(own.update, {name: before[name] for name in written & before.keys()})
                for name in written - before.keys():
                    undo.callback(own.pop, name, None)
        yield


def _call_with_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def begin(x: Any) -> Any:
        return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x

    with torch.enable_grad():
        return function(*map(begin, args), **{name: begin(x) for name, x in kwargs.items()})


class LabelCheck:
    """Warns, once, where rows count though a loss may be the mean of something else.

    Finding out waits for the device: it is due at the first batch, the second, the fourth, and so on.
    """

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._num_calls = 0
        self._is_over = False
        self._ignored = {IGNORED}
        """What losses were seen to ignore: without gradients none can be seen."""

    def is_due(self) -> bool:
        """Count a batch; return whether to look at it: nothing can be read while a CUDA graph is captured."""
        if self._is_over or num_dispatch_modes() or _is_capturing():
            return False
        self._num_calls += 1
        return not self._num_calls & (self._num_calls - 1)

    def look(
        self, shares: Sequence[Any], results: Sequence[Sequence[Tensor]], rows: Sequence[int] = ()
    ) -> Callable[[], None]:
        """Return what warns where labels that losses leave out are spread unevenly over the rows of a batch's shares.

        ``results`` were computed of each. Of a single share, without ``rows``, all labels must count.
        """
        ignored = {IGNORED} if torch.is_grad_enabled() else self._ignored
        kept = [
            [n / (num_rows or size) for n, size in _count_in(share, outputs, ignored)]
            for share, outputs, num_rows in zip(shares, results, rows or [0])
        ]
        columns = [torch.stack([comm.copy(x, column[0].device) for x in column]) for column in zip(*kept)]
        differ = [(x != (x[0] if rows else 1)).any() for x in columns]
        return lambda: self._warn("labels that the loss may leave out are spread unevenly over the batch", differ)

    def note(self, results: Sequence[Tensor]) -> None:
        """Note what losses ignore."""
        self._ignored.update(loss.ignore_index for x in results for loss in _losses_behind(x.grad_fn))

    def warn_of_mixed(self, differ: Tensor) -> None:
        """Warn of a mean of sums of losses, where these are means of different numbers of labels and rows."""
        self._warn("losses were added that are means of different numbers of labels or rows", [differ])

    def _warn(self, what: str, are_any: Sequence[Tensor]) -> None:
        if not self._is_over and any(are_any):
            self._is_over = True
            logger.warning(
                "%s: %s: their mean is taken by rows. Take each loss's own mean before adding; else pass weight=..., "
                "such as weight=lambda ids, labels: (labels != -100).sum(), or the rows, if it is their mean. This is "
                "said once.",
                self._caller, what,
            )  # fmt: skip


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _count_in(share: Any, outputs: Sequence[Tensor], ignored: Iterable[int]) -> Iterator[tuple[Tensor, int]]:
    """Yield what counts of a share's labels, and of those that losses were computed of, and how many each are."""
    leaves = [x for _, x in tree.leaves(share, "")]
    found = [(x, i, None) for x in leaves if are_classes(x) and x.dtype in _SIGNED for i in sorted(ignored)]
    losses = [loss for x in outputs for loss in _losses_behind(x.grad_fn)]
    for target, ignore_index, classes in found + [(x.target, x.ignore_index, x.weight) for x in losses]:
        if target.numel():
            yield count_kept(target.detach(), ignore_index, classes).to(torch.float64), target.numel()


def _losses_behind(node: Node | None) -> Iterator[NllLoss]:
    """Yield the ``nll_loss``es nearest to a loss that may be computed from them."""
    nodes = [node]
    for found in nodes:  # which grows meanwhile
        if (loss := nll_loss_of(found)) is not None:
            yield loss
        elif found is not None and len(nodes) < _MOST_NODES:
            nodes += [n for n, _ in found.next_functions if n not in nodes]
