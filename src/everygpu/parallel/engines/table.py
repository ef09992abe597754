"""The engines by name, and the rule that chooses one."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from everygpu.keys import compiled_original
from everygpu.parallel.engines.captured import CapturedReplicas
from everygpu.parallel.engines.compiled import CompiledReplicas
from everygpu.parallel.engines.engine import Engine, EngineContext
from everygpu.parallel.engines.threads import Workers


def _threads(context: EngineContext) -> Workers:
    return Workers(len(context.devices) - 1)


def _compiled(context: EngineContext) -> CompiledReplicas:
    return CompiledReplicas(context.module(), _threads(context))


def _eager(context: EngineContext) -> Engine:
    return _threads(context) if compiled_original(context.module()) is None else _compiled(context)


def _captured(context: EngineContext) -> Engine:
    return CapturedReplicas(context, _eager(context))


def can_gain(context: EngineContext) -> bool:
    """Whether captures may be faster: not on the CPU, nor than one module that its user has compiled. Over ranks
    there are none, for the hooks that sum gradients.
    """
    is_users = len(context.devices) == 1 and compiled_original(context.module()) is not None
    return context.devices[0].type == "cuda" and not is_users and not context.has_ranks


def _auto(context: EngineContext) -> Engine:
    eager = _eager(context)
    return CapturedReplicas(context, eager, proves=True) if can_gain(context) else eager


_MAKERS: Mapping[str, Callable[[EngineContext], Engine]] = MappingProxyType(
    {
        "auto": _auto,
        "threads": _threads,
        "compile": _compiled,
        "capture": _captured,
    }
)

ENGINES = tuple(_MAKERS)


def make_engine(name: str, context: EngineContext) -> Engine:
    """Make the engine of a name."""
    return _MAKERS[name](context)
