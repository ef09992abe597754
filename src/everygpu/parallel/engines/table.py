"""The engines by name, and the rule that chooses one."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from everygpu.keys import compiled_original
from everygpu.parallel.compiler.split_graph import SplitPolicy
from everygpu.parallel.engines.auto import AutoReplicas
from everygpu.parallel.engines.compiled import CompiledReplicas
from everygpu.parallel.engines.engine import Engine, EngineContext
from everygpu.parallel.engines.graphs import RecordedReplicas
from everygpu.parallel.engines.threads import Workers


def _threads(context: EngineContext) -> Workers:
    return Workers(len(context.devices) - 1)


def _compiled(context: EngineContext, *, is_recorded: bool = False) -> CompiledReplicas:
    # A recording adds gradients up beside its own backward.
    in_pieces = not context.makes_graphs and len(context.devices) > 1
    policy = SplitPolicy(in_pieces=in_pieces, defers_linear=is_recorded)
    return CompiledReplicas(context.module(), _threads(context), cuda_graphs=context.makes_graphs, policy=policy)


def _recorded(context: EngineContext) -> RecordedReplicas:
    is_compiled = compiled_original(context.module()) is not None
    return RecordedReplicas(context, _compiled(context, is_recorded=True) if is_compiled else _threads(context))


_MAKERS: Mapping[str, Callable[[EngineContext], Engine]] = MappingProxyType(
    {
        "auto": AutoReplicas,
        "threads": _threads,
        "compile": _compiled,
        "graphs": _recorded,
    }
)

ENGINES = tuple(_MAKERS)


def choose_engine(name: str, context: EngineContext) -> str:
    """Return the name of the engine to make.

    With "auto", replicas are compiled if the module is; else, on several GPUs, the engine is looked for in the first
    steps. On one device, or on the CPU, there is nothing to gain.
    """
    if name != "auto":
        return name
    if compiled_original(context.module()) is not None:
        return "compile"
    return "auto" if len(context.devices) > 1 and context.devices[0].type == "cuda" else "threads"


def make_engine(name: str, context: EngineContext) -> Engine:
    """Make the engine of a name, or the one that "auto" chooses."""
    return _MAKERS[choose_engine(name, context)](context)
