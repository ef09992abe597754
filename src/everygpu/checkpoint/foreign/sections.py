"""Find the model, the optimizer and the rest in a training script's single file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from everygpu.checkpoint.brief import brief, cut
from everygpu.checkpoint.keys import EXTRA_STATE
from everygpu.checkpoint.modules import is_version
from everygpu.checkpoint.states import Kind
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The state dicts and values of a checkpoint, in whatever format it was written."""

    format: str
    """In words, for people."""
    model: Mapping[str, Any] | None = None
    """Names and tensors, and modules' extra state; None where no state dict was found."""
    why_no_model: str = ""
    """Why ``model`` is None, and what to do."""
    section: str = ""
    """The name under which the model was found; empty where the whole file is its state dict."""
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Versions of the modules' classes, by their path."""
    optimizer: Any = None
    scheduler: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Everything else, by name."""
    notes: tuple[str, ...] = ()
    """Choices among several sections, and sections left out, with the reason."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Versions of libraries, where the checkpoint names them."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """How extras were saved, where the checkpoint says so."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Of optimizers and schedulers, by the part's name, where the checkpoint says so."""
    rng: Any = None
    """Random states, where the checkpoint is ours."""

    def require_model(self, path: object) -> Mapping[str, Any]:
        """Return the model's names and tensors.

        Raises:
            CheckpointMismatchError: there is none.
        """
        if self.model is None:
            raise CheckpointMismatchError(
                f"load: the checkpoint must hold one model's state dict, got {path} with {self.why_no_model}"
            )
        return self.model


def sort_document(document: Any, format_name: str, section: str | None = None) -> Contents:
    """Tell the parts of a document apart.

    Args:
        document: The content of a file: a state dict, or a dict with one in it.
        format_name: In words.
        section: The dotted name of the model's state dict, to overrule the search.
    """
    if not isinstance(document, Mapping):
        return Contents(format=format_name, why_no_model=f"a {type(document).__name__} in it. Save a state_dict.")
    if section is not None:
        return _with_model(_rest(document, format_name, section), section, _at(document, section))
    if is_state(document):
        plain = {str(name): value for name, value in document.items() if not _belongs(name, value)}
        return _with_model(Contents(format=format_name, extras=plain), "", document)
    candidates = find_sections(document)
    chosen = _choose(candidates)
    contents = _rest(document, format_name, chosen)
    if chosen is None:
        return replace(contents, why_no_model=_explain_choice(document, candidates))
    others = [name for name in candidates if name != chosen]
    if others:
        note = f"the model is taken from {chosen!r}; there is also {', '.join(map(repr, others))}"
        contents = replace(contents, notes=(note,))
    return _with_model(contents, chosen, _at(document, chosen))


def find_state(value: Any) -> Mapping[str, Any] | None:
    """Return the state dict that a value is or holds under a usual name; None where it holds none."""
    if is_state(value):
        return _only_state(value)
    chosen = _choose(find_sections(value)) if isinstance(value, Mapping) else None
    return None if chosen is None else _only_state(_at(value, chosen))


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


def _is_mostly_tensors(value: Mapping[Any, Any]) -> bool:
    """Tell a state dict from a record with a tensor in it, such as the best score in a callback's state."""
    return 2 * sum(isinstance(item, Tensor) for item in value.values()) >= len(value)


def _choose(candidates: list[str]) -> str | None:
    """Take the first under a usual name, or the only one there is."""
    usual = [name for name in candidates if name.split(".")[0] in MODEL_NAMES]
    return usual[0] if usual else candidates[0] if len(candidates) == 1 else None


def _explain_choice(document: Mapping[Any, Any], candidates: list[str]) -> str:
    if not candidates:
        names = ", ".join(brief(name) for name in list(document)[:8]) or "nothing"
        return f"{names} in it, and no tensors by name. Save the model's state_dict."
    names = ", ".join(map(brief, candidates[:8])) + (", …" if len(candidates) > 8 else "")
    first = cut(candidates[0])
    return (
        f"several under names of its own: {names}. Load each under its name, {first.split('.')[0]}=module, or "
        f"take one out with `everygpu checkpoint convert --section {first}`."
    )


def _at(document: Any, section: str) -> Any:
    value = document
    for name in section.split(".") if section else ():
        if not isinstance(value, Mapping) or name not in value:
            known = ", ".join(map(repr, find_sections(document))) or "none"
            raise CheckpointMismatchError(
                f"load: the section must be a state dict in the file, got {section!r} where there are {known}. "
                f"Choose one of these."
            )
        value = value[name]
    return value


def _with_model(contents: Contents, section: str, state: Any) -> Contents:
    if not is_state(state):
        raise CheckpointMismatchError(
            f"load: the section must be a state dict, got {section or 'the file'!r} with a {type(state).__name__}. "
            f"Choose another section."
        )
    model = _only_state(state)
    skipped = [name for name in state if name not in model] if section else []
    notes = [f"{name!r} in {section!r} is left out: a {type(state[name]).__name__}, no tensor" for name in skipped]
    versions = getattr(state, "_metadata", None)  # where torch keeps them: Module.state_dict
    return replace(
        contents,
        model=model,
        section=section,
        versions=_checked_versions(versions),
        notes=(*contents.notes, *notes),
    )


def _only_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if _belongs(name, value)}


def _belongs(name: Any, value: Any) -> bool:
    return isinstance(value, Tensor) or str(name).endswith(EXTRA_STATE)


def _checked_versions(versions: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(versions, Mapping):
        return {}
    pairs = versions.items()
    return {path: dict(entry) for path, entry in pairs if isinstance(path, str) and is_version(entry)}


def _rest(document: Mapping[Any, Any], format_name: str, section: str | None) -> Contents:
    """Sort what is not the model."""
    top = section.split(".")[0] if section else None
    others = {str(name): value for name, value in document.items() if name != top}
    optimizer = _take(others, OPTIMIZER_NAMES, is_optimizer_state)
    scheduler = _take(others, SCHEDULER_NAMES, lambda value: isinstance(value, Mapping))
    return Contents(
        format=format_name,
        optimizer=None if optimizer is None else _with_same_ids(optimizer),
        scheduler=scheduler,
        extras=others,
    )


def _take(others: dict[str, Any], names: tuple[str, ...], is_one: Any) -> Any:
    """Remove and return the first value of a kind that stands under one of the names."""
    for name in names:
        value = others.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if is_one(value):
            del others[name]
            return value
    return None


def _with_same_ids(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Number an optimizer's parameters as its groups do: distributed checkpoints turn the numbers into text."""
    state, groups = optimizer["state"], optimizer["param_groups"]
    try:
        ids = {str(i): i for group in groups for i in group["params"]}
        return {**optimizer, "state": {ids.get(str(key), key): value for key, value in state.items()}}
    except (TypeError, LookupError, AttributeError):
        return dict(optimizer)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(isinstance(item, Tensor) or _holds_tensors(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_holds_tensors(item) for item in value)
