"""Which part of another program's file is the model, and which the optimizer."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from everygpu.checkpoint.format import cut
from everygpu.checkpoint.names import EXTRA_STATE
from everygpu.errors import CheckpointMismatchError

MODEL_NAMES = (
    *("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params"),
    *("ema_state_dict", "model_ema", "state_dict_ema", "ema", "params_ema"),
)
"""Where a model is looked for, in this order: averaged weights only where there are no others."""

OPTIMIZER_NAMES = (
    *("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "opt", "optim_state_dict"),
    "optimizer_states",
)
SCHEDULER_NAMES = (
    *("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "sched"),
    "lr_schedulers",
)
"""The last of each is Lightning's, a list with one entry per optimizer."""

_MAX_DEPTH = 3


def is_state(value: Any) -> bool:
    """Tell whether a value is a module's state: names and tensors, without state dicts inside."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    if not any(isinstance(item, Tensor) for item in value.values()):
        return False
    return not any(_holds_tensors(item) for name, item in value.items() if not name.endswith(EXTRA_STATE))


def is_optimizer_state(value: Any) -> bool:
    """Tell whether a value is what ``Optimizer.state_dict`` returns."""
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def belongs(name: Any, value: Any) -> bool:
    """Tell whether an entry of a state dict is a module's."""
    return isinstance(value, Tensor) or str(name).endswith(EXTRA_STATE)


def find_state(value: Any) -> Mapping[str, Any] | None:
    """Return the state dict that a value is or holds under a usual name; None where it holds none."""
    section = "" if is_state(value) else choose(find_sections(value)) if isinstance(value, Mapping) else None
    if section is None:
        return None
    return {name: item for name, item in at(value, section).items() if belongs(name, item)}


def find_sections(document: Mapping[Any, Any], depth: int = 1) -> list[str]:
    """List the dotted names of the state dicts in a document, those under usual names first."""
    found: list[str] = []
    order = {name: position for position, name in enumerate(MODEL_NAMES)}
    for name in sorted((n for n in document if isinstance(n, str)), key=lambda n: order.get(n, len(order))):
        value = document[name]
        if is_state(value) and (name in order or _is_mostly_tensors(value)):
            found.append(name)
        elif isinstance(value, Mapping) and not is_optimizer_state(value) and depth < _MAX_DEPTH:
            found += [f"{name}.{inner}" for inner in find_sections(value, depth + 1)]
    return found


def choose(sections: list[str]) -> str | None:
    """Take the first under a usual name, or the only one there is."""
    usual = [name for name in sections if name.split(".")[0] in MODEL_NAMES]
    return usual[0] if usual else sections[0] if len(sections) == 1 else None


def explain_choice(document: Mapping[Any, Any], sections: list[str]) -> str:
    """Say why no model was chosen, and what to do."""
    if not sections:
        names = ", ".join(repr(cut(name)) for name in list(document)[:8]) or "nothing"
        return f"{names} in it, and no tensors by name. Save the model's state_dict."
    names = ", ".join(repr(cut(name)) for name in sections[:8]) + (", …" if len(sections) > 8 else "")
    first = cut(sections[0])
    return (
        f"several models under names of its own: {names}. Load each under its name, {first.split('.')[0]}=module, or "
        f"take one out with `everygpu checkpoint convert --section {first}`."
    )


def at(document: Any, section: str) -> Any:
    """Return what stands under a dotted name."""
    value = document
    for name in section.split(".") if section else ():
        if not isinstance(value, Mapping) or name not in value:
            known = ", ".join(map(repr, find_sections(document))) or "none"
            raise CheckpointMismatchError(f"load: {section!r} is no state dict in the file. There are: {known}.")
        value = value[name]
    return value


def _is_mostly_tensors(value: Mapping[Any, Any]) -> bool:
    """Tell a state dict from a record with a tensor in it, such as the best score in a callback's state."""
    return 2 * sum(isinstance(item, Tensor) for item in value.values()) >= len(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(isinstance(item, Tensor) or _holds_tensors(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_holds_tensors(item) for item in value)
