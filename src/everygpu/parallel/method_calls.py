"""Methods of the module, called on all devices."""

import difflib
from functools import partial
from typing import Any

from torch import nn

from everygpu.errors import CallError
from everygpu.parallel.transforms import check_transforms
from everygpu.parallel.verbs import Verbs

_SLIP = 0.75
"""How alike a name must be to be suggested: 'genrate' is like 'generate', not like 'get_parameter'."""


class MethodCalls(Verbs):
    """Has other methods of the module run on all devices, as forward does."""

    def call_method(self, name: str, /, *inputs: Any, pad_value: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the module on all devices, each on a share of the batch, as forward is called::

            tokens = model.call_method("generate", ids, max_new_tokens=20, pad_value=0)

        Replicas are brought up to date first, and run in threads, whatever the engine.

        Args:
            name: Of the method.
            *inputs: Positional arguments; cut by rows as forward's are.
            pad_value: What fills up outputs at their ends whose sizes, but for the rows, differ between replicas: a
                replica's ``generate`` stops when all of its rows have ended.
            **kwargs: Keyword arguments; cut by rows, too.
        Returns:
            What the method returns for the whole batch.
        Raises:
            CallError: the module has no such method.
            GatherError: outputs differ in sizes, and there is no ``pad_value``.
            Exception: what the method raised; its ``__cause__`` names the replica.
        """
        check_method(self.module, name)
        if self._ranks is None:
            return self._call_method(name, inputs, kwargs, pad_value)
        run = partial(self._call_method, name, inputs, kwargs, pad_value)
        return self._ranks.forward(run, self.module, inputs, kwargs)

    def _call_method(self, name: str, inputs: tuple[Any, ...], kwargs: dict[str, Any], pad_value: float | None) -> Any:
        if len(self.replica_devices) == 1 and not self._has_overrides:
            return self._forward_alone(inputs, kwargs, name)
        if len(self.replica_devices) > 1:
            check_transforms()
        joins = {"pad_value": pad_value, "advice": "Pass pad_value=... to call_method to fill the shorter ones up."}
        return self._one_at_a_time(lambda: self._run_verbs(inputs, kwargs, name, **joins))


def check_method(module: nn.Module, name: str) -> None:
    """Refuse a method that a module doesn't have.

    Raises:
        CallError: there is none, or it can't be called.
    """
    if not callable(getattr(module, name, None)):
        names = [n for n in dir(module) if not n.startswith("_")]
        close = difflib.get_close_matches(name, names, 1, _SLIP)
        advice = f"Did you mean {close[0]!r}?" if close else "Define it in the module's class."
        raise CallError(f"call_method: {type(module).__qualname__} must have the method, got {name!r}. {advice}")
