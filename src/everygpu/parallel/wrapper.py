"""What makes a wrapper look like its module: state dicts, attributes, registration, pickles."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from everygpu.keys import align_keys, unwrap
from everygpu.parallel.fully_sharded.shards import shard_state
from everygpu.parallel.replicas.remap import TABLES


class ModuleWrapper(nn.Module):
    """Holds a module as ``module``, and behaves like it.

    What is saved, loaded, read, set and registered is the module's, except for the attributes that the wrapper has of
    its own. A subclass sets ``module`` once it has called ``__init__``.
    """

    module: nn.Module
    wraps_a_module = True
    """Marks the class for ``everygpu.keys.unwrap``."""
    _transient: ClassVar[frozenset[str]] = frozenset()
    """Attributes that a copy or a pickle makes again; the wrapper's, even if the module has the same names."""
    _keeps_attributes: ClassVar[bool] = False
    """Whether new attributes stay on the wrapper: a subclass's methods set their own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._keeps_attributes = not cls.__module__.startswith("everygpu.")

    def _prepare(self) -> None:
        """Set the transient attributes."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state dict, without ``module.`` in front: it loads anywhere."""
        return unwrap(self).state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict saved with or without ``module.``, ``_orig_mod.`` or ``_fsdp_wrapped_module.``."""
        inner = unwrap(self)
        own = inner.state_dict()
        aligned = align_keys(state_dict, own.keys())
        shard_state(aligned, own)
        return inner.load_state_dict(aligned, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as part of a larger model, whose state dict has this wrapper's parameters prefix-free."""
        names = [key for key in state_dict if key.startswith(prefix)]
        mine = {key[len(prefix) :]: state_dict.pop(key) for key in names}
        expected = [f"module.{key}" for key in self.module.state_dict()]
        state_dict.update({prefix + key: value for key, value in align_keys(mine, expected).items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this wrapper, then the module and its submodules under the module's own names.

        ``named_parameters()`` and ``named_buffers()`` come from here, and have no ``module.`` in front, either.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, child in self._modules.items():
            if name == "module":
                yield from unwrap(self).named_modules(memo, prefix, remove_duplicate)
            elif child is not None:
                yield from child.named_modules(memo, f"{prefix}.{name}".lstrip("."), remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # While unpickling there is no module yet: looking it up must not come back here.
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes on the module, as in ``model.fc = nn.Linear(model.fc.in_features, 10)``, except its own."""
        if self._has_own(name) or (self._stays(name) and not hasattr(self.module, name)):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._has_own(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def _stays(self, name: str) -> bool:
        """Whether an attribute that neither has is the wrapper's: libraries mark it by private names."""
        return self._keeps_attributes or name.startswith("_")

    def _has_own(self, name: str) -> bool:
        """Whether a name is the wrapper's; all are until it has its module."""
        mine = vars(self)
        if mine.get("_modules", {}).get("module") is None or name in mine or name in self._transient:
            return True
        return hasattr(type(self), name) or any(name in mine[table] for table in TABLES)

    # What is registered with the wrapper itself would be in no state dict and in no replica.

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer of the module."""
        owner: Any = super() if self._has_own(name) else unwrap(self)
        owner.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of the module."""
        owner: Any = super() if self._has_own(name) else unwrap(self)
        owner.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a submodule to the module; so does ``register_module``."""
        owner: Any = super() if self._has_own(name) else unwrap(self)
        owner.add_module(name, module)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in self._transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()
