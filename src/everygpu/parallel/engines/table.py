"""The engines by name, and the rule that chooses one."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from everygpu.keys import compiled_original
from everygpu.parallel.compiler.split_graph import SplitPolicy
from everygpu.parallel.engines.compiled import CompiledReplicas
from everygpu.parallel.engines.engine import Engine, EngineContext
from everygpu.parallel.engines.graphs import RecordedReplicas
from everygpu.parallel.engines.processes.engine import ProcessReplicas
from everygpu.parallel.engines.threads import Workers


def _threads(context: EngineContext) -> Workers:
    return Workers(len(context.devices) - 1)


def _compiled(context: EngineContext, *, is_recorded: bool = False) -> CompiledReplicas:
    # A recording adds gradients up beside its own backward.
    in_pieces = not context.makes_graphs and len(context.devices) > 1
    policy = SplitPolicy(in_pieces=in_pieces, defers_linear=is_recorded)
    return CompiledReplicas(context.module(), _threads(context), cuda_graphs=context.makes_graphs, policy=policy)


def _recorded(context: EngineContext) -> RecordedReplicas:
    is_compiled = choose_engine("auto", context.module()) == "compile"
    return RecordedReplicas(context, _compiled(context, is_recorded=True) if is_compiled else _threads(context))


def _in_processes(context: EngineContext) -> ProcessReplicas:
    return ProcessReplicas(context.devices)


_MAKERS: Mapping[str, Callable[[EngineContext], Engine]] = MappingProxyType(
    {
        "threads": _threads,
        "compile": _compiled,
        "graphs": _recorded,
        "processes": _in_processes,
    }
)

ENGINES = ("auto", *_MAKERS)


def choose_engine(name: str, module: nn.Module) -> str:
    """Return the name of the engine to make: with "auto", replicas are compiled if the module is."""
    if name != "auto":
        return name
    return "threads" if compiled_original(module) is None else "compile"


def make_engine(name: str, context: EngineContext) -> Engine:
    """Make the engine of a name, or the one that "auto" chooses."""
    return _MAKERS[choose_engine(name, context.module())](context)


_AUTO = MappingProxyType(
    {
        "threads": "replicas run eagerly, each in a thread, as the module didn't go through torch.compile. With "
        'engine="compile" one thread launches them all; with engine="graphs", or everygpu.TrainStep, no Python at all',
        "compile": "replicas are compiled, as the module went through torch.compile, and launched from one thread",
    }
)


def why_auto(module: nn.Module) -> str:
    """Say which engine "auto" chooses, and why."""
    return _AUTO[choose_engine("auto", module)]
