"""The parts of a checkpoint, and how they are recognized in other programs' files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from everygpu.checkpoint.values import cut
from everygpu.errors import CheckpointMismatchError

EXTRA_STATE = "_extra_state"
"""What ``Module.get_extra_state`` returned is saved under a name that ends so."""

Kind: TypeAlias = Literal["module", "state_dict", "generator", "plain"]
"""How a value is saved: a module by names, an object by its state_dict, a torch.Generator, or as it is."""

KNOWN = ("model", "optimizer", "scheduler")
"""Parts that have a place of their own in every checkpoint."""

MODEL_NAMES = (
    *("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params"),
    *("ema_state_dict", "model_ema", "state_dict_ema", "ema", "params_ema"),
)
"""Where a model is looked for, in this order: averaged weights only where there are no others."""
_OTHER_NAMES = {
    "optimizer": (
        *("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "opt", "optim_state_dict"),
        "optimizer_states",
    ),
    "scheduler": (
        *("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "sched"),
        "lr_schedulers",
    ),
}
"""The last of each is Lightning's, a list with one entry per optimizer."""
_MAX_DEPTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One saved object or value."""

    kind: Kind | None
    """None in another program's file, which doesn't say."""
    state: Any
    class_name: str | None = None
    """Of an optimizer or a scheduler, where the checkpoint has it."""
    parameters: list[list[str | None]] | None = None
    """Names of an optimizer's parameters, by group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The parts of a checkpoint, in whatever format it was written."""

    format: str
    """In words, for people."""
    parts: Mapping[str, Part]
    """Those of model, optimizer and scheduler that were found."""
    extras: Mapping[str, Part] = field(default_factory=dict)
    """Everything else, by name."""
    why_no_model: str = "no model in it. Save one with everygpu.save(path, model=model)."
    section: str = ""
    """The name under which the model was found; empty where the whole file is its state dict."""
    notes: tuple[str, ...] = ()
    """Choices among several sections, and values left out."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    rng: Any = None
    step: int | None = None
    """Of a run."""

    def require_model(self, path: object) -> Mapping[str, Any]:
        """Return the model's names and tensors."""
        if "model" not in self.parts:
            raise CheckpointMismatchError(f"load: {path} has {self.why_no_model}")
        values: Mapping[str, Any] = self.parts["model"].state["values"]
        return values


def sort_document(document: Any, words: str, section: str | None) -> Contents:
    """Split a document into the model, the optimizer, the scheduler, and the rest."""
    if not isinstance(document, Mapping):
        kind = type(document).__name__
        return Contents(format=words, parts={}, why_no_model=f"a {kind} in it. Save a state_dict.")
    sections = {"": document} if section is None and is_state(document) else find_sections(document)
    chosen = _choose(sections) if section is None else section
    if chosen is not None and chosen not in sections:
        known = ", ".join(map(repr, sections)) or "none"
        raise CheckpointMismatchError(f"load: {section!r} is no state dict in the file. There are: {known}.")
    extras = {
        str(name): value
        for name, value in document.items()
        if (name != (chosen or "").split(".")[0] if chosen != "" else not _belongs(name, value))
    }
    parts: dict[str, Part] = {}
    for part, names in _OTHER_NAMES.items():
        found = {name: extras[name] for name in names if name in extras}
        found |= {name: of[0] for name, of in found.items() if isinstance(of, list) and len(of) == 1}
        is_one = is_optimizer_state if part == "optimizer" else lambda value: isinstance(value, Mapping)
        if (own := next(filter(lambda name: is_one(found[name]), found), None)) is not None:
            del extras[own]
            parts[part] = Part(kind=None, state=_with_same_ids(found[own]) if part == "optimizer" else found[own])
    notes = []
    if chosen is not None:
        parts["model"] = _model_part(sections[chosen])
        if others := [repr(name) for name in sections if name != chosen and section is None]:
            notes.append(f"the model is taken from {chosen!r}; there is also {', '.join(others)}")
        for name, value in sections[chosen].items() if chosen else ():
            if not _belongs(name, value):
                notes.append(f"{name!r} in {chosen!r} is left out: a {type(value).__name__}, no tensor")
    return Contents(
        format=words,
        parts=parts,
        extras={name: Part(kind=None, state=value) for name, value in extras.items()},
        why_no_model="" if chosen is not None else _explain_choice(document, list(sections)),
        section=chosen or "",
        notes=tuple(notes),
    )


def find_state(value: Any) -> Part | None:
    """Return the state dict that a value is or holds under a usual name; None where it holds none."""
    sections = {"": value} if is_state(value) else find_sections(value) if isinstance(value, Mapping) else {}
    chosen = _choose(sections)
    return None if chosen is None else _model_part(sections[chosen])


def is_state(value: Any) -> bool:
    """Whether a value is a module's state: names and tensors, without state dicts inside."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    if not any(isinstance(item, Tensor) for item in value.values()):
        return False
    return not any(_holds_tensors(item) for name, item in value.items() if not name.endswith(EXTRA_STATE))


def is_optimizer_state(value: Any) -> bool:
    """Whether a value is what ``Optimizer.state_dict`` returns."""
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def find_sections(document: Mapping[Any, Any], depth: int = 1) -> dict[str, Mapping[str, Any]]:
    """Return the state dicts in a document by their dotted names, those under usual names first."""
    found: dict[str, Mapping[str, Any]] = {}
    order = {name: position for position, name in enumerate(MODEL_NAMES)}
    for name in sorted((n for n in document if isinstance(n, str)), key=lambda n: order.get(n, len(order))):
        value = document[name]
        if is_state(value):
            # Not a record with a tensor in it, such as the best score in a callback's state.
            num_tensors = sum(isinstance(item, Tensor) for item in value.values())
            found |= {name: value} if name in order or 2 * num_tensors >= len(value) else {}
        elif isinstance(value, Mapping) and not is_optimizer_state(value) and depth < _MAX_DEPTH:
            found |= {f"{name}.{inner}": state for inner, state in find_sections(value, depth + 1).items()}
    return found


def _choose(sections: Mapping[str, Any]) -> str | None:
    """Take the first under a usual name, or the only one there is."""
    usual = [name for name in sections if name.split(".")[0] in MODEL_NAMES]
    return next(iter(usual), None) if usual or len(sections) != 1 else next(iter(sections))


def _explain_choice(document: Mapping[Any, Any], sections: list[str]) -> str:
    """Say why no model was chosen, and what to do."""
    names = ", ".join(repr(cut(name)) for name in (sections or list(document))[:8]) or "nothing"
    if not sections:
        return f"{names} in it, and no tensors by name. Save the model's state_dict."
    first = cut(sections[0])
    return (
        f"several models under names of its own: {names}. Load each under its name, {first.split('.')[0]}=module, or "
        f"take one out with `everygpu checkpoint convert --section {first}`."
    )


def _belongs(name: Any, value: Any) -> bool:
    """Whether an entry of a state dict is a module's."""
    return isinstance(value, Tensor) or str(name).endswith(EXTRA_STATE)


def _model_part(state: Mapping[str, Any]) -> Part:
    versions = getattr(state, "_metadata", None)
    pairs = versions.items() if isinstance(versions, Mapping) else ()
    versions = {path: dict(entry) for path, entry in pairs if isinstance(path, str) and isinstance(entry, Mapping)}
    values = {name: value for name, value in state.items() if _belongs(name, value)}
    return Part(kind="module", state={"values": values, "versions": versions})


def _with_same_ids(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Number an optimizer's parameters as its groups do: distributed checkpoints turn the numbers into text."""
    try:
        ids = {str(i): i for group in optimizer["param_groups"] for i in group["params"]}
        return {**optimizer, "state": {ids.get(str(key), key): value for key, value in optimizer["state"].items()}}
    except (TypeError, LookupError, AttributeError):
        return dict(optimizer)


def _holds_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, Tensor) or _holds_tensors(item) for item in items)
