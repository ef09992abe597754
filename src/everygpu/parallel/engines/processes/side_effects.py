"""Whether forward changes something that other processes have a copy of."""

from collections.abc import Iterator
from typing import Any

import cloudpickle
from torch import Tensor, nn

from everygpu.parallel.cuda_graphs.guards import hooks_of
from everygpu.parallel.engines.processes.used_globals import UsedGlobals, Variable
from everygpu.parallel.engines.processes.watched_globals import WatchedGlobals
from everygpu.parallel.replicas.callables import MISSING
from everygpu.parallel.replicas.contents import CONTAINERS, DeepContents, is_open
from everygpu.parallel.replicas.watch import TABLES


class SideEffects:
    """Notices what a forward changes outside its module tree: globals, class attributes, closures, shared objects.

    ::

        effects = SideEffects(model)
        effects.begin()
        model(x)
        reason = effects.end()  # "forward changes global variable train.NUM_CALLS (train.py:12)", or None

    What the tree's own modules have as attributes is theirs: each replica has its own. Not noticed is what forward
    prints, writes to files or into its arguments, the state of objects in C, and what libraries change within them.

    Args:
        module: The root of the tree.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._watch: WatchedGlobals | None = None
        self._objects: list[_Object] = []
        self._opaque: list[tuple[Variable, bytes | None]] = []

    def begin(self) -> None:
        """Take note of everything before a forward."""
        modules = list(self._module.modules())
        self._watch = WatchedGlobals(modules, {id(t): t for t in _tensors(self._module)})
        self._opaque = [(v, _pickled(v)) for v in self._watch.opaque()]
        self._objects = list(_objects(self._module))

    def end(self) -> str | None:
        """Return what the forward since ``begin`` has changed, in one line; None if nothing was found.

        User hooks count as such changes: they are there for what they do elsewhere.
        """
        hooked = next((what for what, hooks in hooks_of([self._module]) if not all(map(_is_ours, hooks))), None)
        if hooked is not None:
            return f"{hooked}, which would run in other processes"
        if self._watch is None:
            return None
        used = self._watch.used
        changed = [] if self._watch.is_same() else self._watch.changed()
        changed += [v for v, data in self._opaque if _pickled(v) != data]
        if changed:
            return f"forward changes {_name(changed[0], used)}"
        return next((f"forward changes {o.describe(used)}" for o in self._objects if not o.contents.is_same()), None)


class _Object:
    """An object in an attribute of a module, such as a configuration.

    Args:
        where: The module's path and the attribute's.
        value: The object.
        known: By ``id``, what is no part of it.
    """

    def __init__(self, where: str, value: Any, known: dict[int, Any]) -> None:
        self._where, self._value = where, value
        self._before = dict(vars(value))
        self.contents = DeepContents([value], known)

    def describe(self, used: UsedGlobals) -> str:
        """Name the object and, where that is known, its attribute and the line that writes it."""
        now = vars(self._value)
        keys = [k for k in {**self._before, **now} if now.get(k, MISSING) is not self._before.get(k, MISSING)]
        what = f"attribute {keys[0]!r} of the" if keys else "what is in the"
        line = used.stores.get(keys[0]) if keys else None
        return f"{what} {type(self._value).__name__} in attribute {self._where}" + (f" ({line})" if line else "")


def _name(variable: Variable, used: UsedGlobals) -> str:
    line = used.stores.get(variable.path[-1]) or variable.where
    return f"{variable} ({line})" if line and line not in str(variable) else str(variable)


def _objects(module: nn.Module) -> Iterator[_Object]:
    known: dict[int, Any] = {id(x): x for x in (*module.modules(), *_tensors(module))}
    for path, m in module.named_modules():
        for name, value in vars(m).items():
            if name not in TABLES:
                for held in _open_objects(value):
                    yield _Object(f"{path}.{name}" if path else name, held, known)


def _open_objects(value: Any, depth: int = 4) -> Iterator[Any]:
    if isinstance(value, CONTAINERS) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _open_objects(item, depth - 1)
    elif is_open(value) and not isinstance(value, CONTAINERS):
        yield value


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _pickled(variable: Variable) -> bytes | None:
    try:
        return bytes(cloudpickle.dumps(variable.read()))
    except Exception:  # noqa: BLE001 - whatever an object raises that can't be pickled
        return None


def _is_ours(hook: Any) -> bool:
    """Tell whether a hook is torch's own, as of ``weight_norm``, or this package's."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] in ("torch", "everygpu")
