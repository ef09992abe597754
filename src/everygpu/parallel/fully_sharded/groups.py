"""Which modules of a model are shared out together: each is whole while it runs, the others are not."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from everygpu.errors import OptionError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Nobody calls these: no forward of theirs could ask for the parameters."""
_LEAST = 16
"""A module with fewer parameters than the largest block by this factor is no group of its own."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Modules of a model, none within another; what is in none of them is the root's."""

    blocks: tuple[nn.Module, ...]
    """Alike, as the layers of a transformer."""
    others: tuple[nn.Module, ...]
    """Beside them, such as have a quarter of all parameters; or, where there are no blocks, whatever is large."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((*self.blocks, *self.others))


def find_groups(model: nn.Module, wrap: Sequence[type[nn.Module]] | None = None) -> Groups:
    """Find blocks: children of one class in the outermost lists, or those of ``wrap``; then large modules beside them.

    Modules that share a parameter with one outside are left to the root, as nobody else has it whole for both.

    Raises:
        OptionError: the model has no module of ``wrap``.
    """
    if wrap is not None:
        blocks = list(_outermost(model, tuple(wrap)))
        if not blocks:
            names = ", ".join(kind.__qualname__ for kind in wrap)
            raise OptionError(f"DataParallel: the model has no module of wrap={names}. Pass the classes of its blocks.")
        others: list[nn.Module] = []
    else:
        blocks = [b for b in _blocks_in_lists(model) if num_parameters(b)]
        largest = max(map(num_parameters, blocks), default=0)
        blocks = [b for b in blocks if num_parameters(b) * _LEAST >= largest]
        total = num_parameters(model)
        others = list(_large_children(model, set(blocks), total // (4 if blocks else _LEAST) or 1))
    blocks, others = list(dict.fromkeys(blocks)), list(dict.fromkeys(others))  # one may stand in a list many times
    shared = _shared_parameters(model, [*blocks, *others])
    blocks, others = ([m for m in part if not _has_any(m, shared)] for part in (blocks, others))
    return Groups(tuple(blocks), tuple(others))


def num_parameters(module: nn.Module) -> int:
    """Count the elements of a module's parameters; tied ones once."""
    return sum(p.numel() for p in module.parameters())


def _outermost(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, kinds):
            yield child
        else:
            yield from _outermost(child, kinds)


def _blocks_in_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of one class in the outermost lists; of lists of lists, those within."""
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(module, ParametrizationList)
    listed = module._modules.values() if is_list else ()  # each as often as it is called, where children() has it once
    counts = Counter(type(child) for child in listed if child is not None and num_parameters(child))
    for child in module.children():
        found = list(_blocks_in_lists(child)) if counts[type(child)] < 2 or _is_list(child) else []
        if found:
            yield from found
        elif counts[type(child)] > 1 and not isinstance(child, _CONTAINERS):
            yield child


def _is_list(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.Sequential)


def _large_children(module: nn.Module, blocks: set[nn.Module], least: int) -> Iterator[nn.Module]:
    """Yield the modules beside the blocks that are large enough, and have none of them within."""
    for child in module.children():
        if child in blocks:
            continue
        is_open = isinstance(child, _CONTAINERS) or any(m in blocks for m in child.modules())
        is_most = not blocks and num_parameters(child) * 2 > num_parameters(module)
        found = list(_large_children(child, blocks, least)) if is_open or is_most else []
        if found or is_open:
            yield from found
        elif num_parameters(child) >= least:
            yield child


def _shared_parameters(model: nn.Module, groups: Sequence[nn.Module]) -> set[int]:
    """Return which parameters stand in several groups, or in one and outside of all."""
    owners: dict[int, set[int]] = {}
    group_of = {id(m): i for i, group in enumerate(groups) for m in group.modules()}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), set()).add(group_of.get(id(module), -1))
    return {key for key, found in owners.items() if len(found) > 1}


def _has_any(module: nn.Module, parameters: set[int]) -> bool:
    return any(id(p) in parameters for p in module.parameters())
