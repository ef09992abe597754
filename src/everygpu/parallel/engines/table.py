"""The engines by name, and the rule that chooses one."""

from everygpu.keys import compiled_original
from everygpu.parallel.engines.captured import CapturedReplicas
from everygpu.parallel.engines.compiled import CompiledReplicas
from everygpu.parallel.engines.engine import Engine, Wrapper
from everygpu.parallel.engines.threads import Workers

ENGINES = ("auto", "threads", "compile", "capture")


def make_engine(name: str, wrapper: Wrapper) -> Engine:
    """Make the engine of a name."""
    workers = Workers(len(wrapper.replica_devices) - 1, lambda *replicas: wrapper._random_for(*replicas))
    eager: Engine = workers
    is_users = compiled_original(wrapper.module) is not None and not wrapper.replicas_per_device
    if name == "compile" or (name != "threads" and is_users):
        eager = CompiledReplicas(wrapper.module, workers)
    if name == "capture" or (name == "auto" and can_gain(wrapper)):
        return CapturedReplicas(wrapper, eager, proves=name == "auto")
    return eager


def can_gain(wrapper: Wrapper) -> bool:
    """Whether captures may be faster: not on the CPU, nor than one module that its user has compiled. Over ranks
    there are none, for the hooks that sum gradients.
    """
    is_users = len(wrapper.replica_devices) == 1 and compiled_original(wrapper.module) is not None
    return wrapper.replica_devices[0].type == "cuda" and not is_users and wrapper.rank_model is None
