"""A stock optimizer whose work and state are spread over the devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from everygpu import comm, tree
from everygpu.devices.parse import DeviceLike, parse_devices
from everygpu.errors import OptimizerError
from everygpu.parallel.buckets import check_bucket_cap, plan_buckets, update_bucket_bytes
from everygpu.parallel.fully_sharded.shards import is_shard
from everygpu.progress import running
from everygpu.step.flat_parameters import check_memory
from everygpu.step.shards import ELEMENTWISE, WHOLE, Shards, State, all_params, can_shard
from everygpu.torch_private.core import foreach_copy_

_OWNER = "_everygpu_sharded"
"""Attribute of a stock optimizer: the object that has its state."""


class ShardedOptimizer(Optimizer):
    """Spread a stock optimizer's work and state over several devices, 1/N on each.

    Use it in place of the stock optimizer, in an ordinary loop after ``loss.backward()`` or in ``TrainStep``::

        optimizer = everygpu.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))

    You still use the stock optimizer. Its ``param_groups`` are read at every step, so schedulers and edits take effect
    at the next one. Its ``state_dict()`` returns the whole state in torch's own format, which loads into plain torch
    and back, on any number of devices. Between steps its ``state`` is empty. Each part of the state exists once, so
    ``TrainStep(check_every=...)``, which compares copies, can't find a flipped bit in it.

    Args:
        optimizer: One of torch.optim that updates each element by itself: ASGD, Adadelta, Adagrad, Adam, AdamW,
            Adamax, NAdam, RAdam, RMSprop, Rprop, SGD; or each parameter: Adafactor, Muon. Its state is taken over.
        device_ids: As for ``DataParallel``; by default every CUDA device if the parameters are on CUDA, otherwise
            the parameters' own device.
        bucket_cap_mb: Gradients and parameters travel in buckets of about this many MiB; 12 by default, or more for
            large models. In ``TrainStep`` the ``bucket_cap_mb`` of its ``DataParallel`` is used.
        whole: Have one device update each parameter as a whole; parameters are distributed by size. Adafactor and Muon
            always do so. Pass it for an optimizer of your own, such as Shampoo, that updates each parameter from that
            parameter's gradient and state alone.
    Attributes:
        module: The stock optimizer.
    Raises:
        OptimizerError: this optimizer can't be sharded.
        DeviceError: a device is unknown or absent.
        OptionError: ``bucket_cap_mb`` is no size.
    Source:
        ZeRO stage 1: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
        2020. ``torch.distributed.optim.ZeroRedundancyOptimizer`` distributes whole parameters, to processes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device_ids: Sequence[DeviceLike] | None = None,
        *,
        bucket_cap_mb: float | None = None,
        whole: bool = False,
    ) -> None:
        _check(optimizer, whole=whole)
        check_bucket_cap(bucket_cap_mb, "ShardedOptimizer")
        self.module = optimizer
        self.whole = whole or type(optimizer) in WHOLE
        self.bucket_cap_mb = bucket_cap_mb
        self.devices = _find_devices(optimizer, device_ids)
        # Not Optimizer.__init__, which wants parameters of its own: this gives it its hooks.
        super().__setstate__({"defaults": optimizer.defaults})
        self._params: list[Tensor] = []
        self._shards: Shards | None = None
        self._left_out: dict[Tensor, State] = {}
        if (owner := getattr(optimizer, _OWNER, None)) is not None:
            owner.release()
        self._handles = self._watch_module()
        setattr(optimizer, _OWNER, self)
        # copy and pickle ask the object first. The copy is a stock optimizer with all of the state.
        optimizer.__getstate__ = self._state_of_module  # type: ignore[method-assign]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The stock optimizer's groups."""
        return self.module.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The stock optimizer's state, which is empty between steps; ``state_dict()`` has all of it."""
        return self.module.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from their gradients.

        Args:
            closure: Computes the loss again, as for any optimizer.
        Returns:
            What the closure returned.
        Raises:
            OptimizerError: a gradient is sparse; the stock optimizer has another owner now.
        """
        self.check_owner()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._call_before()  # and torch calls this object's own hooks
            with running("update"):
                self._own_shards().step_alone(self.param_groups)
            self._call_after()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the stock optimizer does."""
        self.module.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in torch's own format, on the parameters' device; on the CPU for several GPUs."""
        return self.module.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of the stock optimizer's class, from this class or from plain torch."""
        self.module.load_state_dict(dict(state_dict))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the stock optimizer."""
        self.module.add_param_group(param_group)

    def state_bytes(self) -> list[int]:
        """Return how many bytes of state each device holds."""
        return self._shards.state_bytes() if self._shards is not None else [0] * len(self.devices)

    def release(self) -> None:
        """Return the whole state to the stock optimizer; this object is unusable afterwards."""
        if getattr(self.module, _OWNER, None) is self:
            self._fill_state()
            self._shards = None
            for handle in self._handles:
                handle.remove()
            delattr(self.module, _OWNER)
            del self.module.__getstate__

    def __getstate__(self) -> dict[str, Any]:
        options = {"bucket_cap_mb": self.bucket_cap_mb, "whole": self.whole}
        return {"module": self.module, "devices": self.devices, "options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["module"], state["devices"], **state["options"])  # type: ignore[misc]

    # How TrainStep uses it.

    @staticmethod
    def of(optimizer: Optimizer, devices: Sequence[torch.device]) -> "ShardedOptimizer":
        """Return the owner of a stock optimizer's state if it has one for these devices, else a new one."""
        owner = getattr(optimizer, _OWNER, None)
        if isinstance(owner, ShardedOptimizer) and owner.devices == list(devices):
            return owner
        return ShardedOptimizer(optimizer, devices)

    def check_owner(self) -> None:
        """Refuse to step when the state is no longer here."""
        if getattr(self.module, _OWNER, None) is not self:
            raise OptimizerError(
                "ShardedOptimizer: the stock optimizer's state must be here, got one that was released, or wrapped "
                "again for other devices. Use the new wrapper, or make one more."
            )

    def attach(self, params: Sequence[Tensor], shards: Shards) -> None:
        """Move the state to other shards, which have none yet."""
        self._fill_state()
        shards.take_state(dict(self.module.state))
        self._params, self._shards = list(params), shards  # now: an interruption before has left all of the state
        self._drop_whole_state()

    def return_to_stock_optimizer(self) -> None:
        """Give the stock optimizer its whole state, which is to step itself."""
        self._fill_state(self._params[0].device if self._params else None)
        self._shards = None

    def holds(self, shards: Shards) -> bool:
        """Whether the state is in these shards now."""
        return self._shards is shards

    def has_pre_hooks(self) -> bool:
        """Whether hooks may write gradients or parameters at ``before_step``."""
        return len(self.module._optimizer_step_pre_hooks) > 1 or bool(self._optimizer_step_pre_hooks)

    def before_step(self) -> None:
        """Call the hooks of both optimizers; what they write to parameters and gradients counts."""
        for hook in list(self._optimizer_step_pre_hooks.values()):
            hook(self, (), {})
        self._call_before()

    def after_step(self) -> None:
        """Call the hooks of both optimizers, once the parameters have their new values."""
        self._call_after()
        for hook in list(self._optimizer_step_post_hooks.values()):
            hook(self, (), {})

    # The stock optimizer's hooks.

    def _call_before(self) -> None:
        for key, hook in list(self.module._optimizer_step_pre_hooks.items()):
            if key != self._handles[0].id:
                hook(self.module, (), {})

    def _call_after(self) -> None:
        # Schedulers ask whether the optimizer has stepped, whichever of the two they were given.
        self.module._opt_called = self._opt_called = True  # type: ignore[attr-defined]
        for hook in list(self.module._optimizer_step_post_hooks.values()):
            hook(self.module, (), {})

    # In an ordinary loop: gradients and parameters are on the primary device.

    def _own_shards(self) -> "_ChunkShards":
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        shards = self._shards
        if not isinstance(shards, _ChunkShards) or not shards.fits(params):
            shards = _ChunkShards(self.module, params, self.devices, self.bucket_cap_mb, whole=self.whole)
            self.attach(params, shards)
        return shards

    def _state_of_module(self) -> dict[str, Any]:
        # A copy on the same devices: its tensors are where the stock optimizer looks for them.
        self._fill_state(self._params[0].device if self._params else None)
        try:
            state = type(self.module).__getstate__(self.module)
            return {**state, "state": self.module.state.copy()}
        finally:
            self._drop_whole_state()

    # The stock optimizer's own state_dict and load_state_dict.

    def _watch_module(self) -> list[RemovableHandle]:
        def take_back(_: Optimizer, args: Any, kwargs: Any) -> None:
            self.return_to_stock_optimizer()  # until the next step of this one

        def fill(_: Optimizer) -> None:
            self._fill_state()
            # Of parameters that have left the groups, which may come back, torch's state dict has no place for a state.
            state, own = self.module.state, set(map(id, all_params(self.module)))
            self._left_out |= {p: state.pop(p) for p in list(state) if id(p) not in own}

        def clear(_: Optimizer, state_dict: dict[str, Any]) -> None:
            self.module.state.update(self._left_out)
            self._left_out = {}
            self._drop_whole_state()

        def spread(_: Optimizer) -> None:
            if self._shards is not None:
                self._shards.forget_state()
                self._spread_state()

        return [
            self.module.register_step_pre_hook(take_back),
            self.module.register_state_dict_pre_hook(fill),
            self.module.register_state_dict_post_hook(clear),
            self.module.register_load_state_dict_post_hook(spread),
        ]

    def _fill_state(self, home: torch.device | None = None) -> None:
        if self._shards is not None:
            several = len(set(self.devices)) > 1
            home = home or (torch.device("cpu") if several else self.devices[0])
            self.module.state.update(self._shards.collect_state(home))

    def _spread_state(self) -> None:
        if self._shards is not None:
            state: dict[Tensor, State] = dict(self.module.state)
            self._shards.take_state(state)
            self._drop_whole_state()

    def _drop_whole_state(self) -> None:
        """Leave the stock optimizer only the state of parameters that take no gradient now."""
        for p in self._params if self._shards is not None else ():
            self.module.state.pop(p, None)


def _check(optimizer: Any, *, whole: bool) -> None:
    if isinstance(optimizer, ShardedOptimizer) or not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"ShardedOptimizer: needs a torch.optim.Optimizer, got {type(optimizer).__qualname__}. "
            f"Pass for instance torch.optim.AdamW(model.parameters())."
        )
    if not (whole or can_shard(optimizer)):
        names = ", ".join(kind.__name__ for kind in (*ELEMENTWISE, *WHOLE))
        raise OptimizerError(
            f"ShardedOptimizer: the optimizer must be one of {names}, not differentiable, got "
            f"{type(optimizer).__qualname__}. Pass whole=True if it updates each parameter from that one's gradient "
            f"and state alone; else use it as it is: on the primary device."
        )
    if any(map(is_shard, all_params(optimizer))):
        raise OptimizerError(
            "ShardedOptimizer: the parameters are sharded over ranks, and their states with them. Use the stock "
            "optimizer."
        )
    if any(p.layout != torch.strided or p.is_quantized for p in all_params(optimizer)):
        raise OptimizerError("ShardedOptimizer: parameters must be dense, got a sparse one. Use the stock optimizer.")


def _find_devices(optimizer: Optimizer, device_ids: Sequence[DeviceLike] | None) -> list[torch.device]:
    if device_ids is not None:
        return parse_devices(device_ids, may_repeat=True)  # as a DataParallel's of several replicas on each
    home = next((p.device for p in all_params(optimizer)), torch.device("cpu"))
    if home.type != "cuda":
        return [home]
    return [home, *(d for d in parse_devices(None) if d != home)]


class _ChunkShards(Shards):
    """Shards in chunks of each device's own, where parameters and gradients are on the primary device."""

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        devices: Sequence[torch.device],
        bucket_cap_mb: float | None,
        *,
        whole: bool,
    ) -> None:
        check_memory(params)
        self._shapes = [_shape_of(p) for p in params]
        plans = plan_buckets(params, len(devices), update_bucket_bytes(params, bucket_cap_mb), whole=whole)
        values, grads = ([[plan.make_chunk(d) for d in devices] for plan in plans] for _ in range(2))
        super().__init__(optimizer, params, plans, values, grads, whole=whole)

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the parameters it was made for, of the same shapes and dtypes."""
        return tree.are_same(params, self.params) and list(map(_shape_of, params)) == self._shapes

    def step_alone(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Update the parameters from their gradients, both on the primary device."""
        grads = [p.grad for p in self.params]
        for index, grad in enumerate(grads):
            if grad is not None and grad.layout != torch.strided:
                raise OptimizerError(
                    f"ShardedOptimizer: gradients must be dense, got a sparse one for parameter {index} of shape "
                    f"{tuple(self.params[index].shape)}. Use the stock optimizer, or sparse=False."
                )
        self._load(self.params, self._values)
        self._load(grads, self._grads)
        try:
            touched = {i for i, g in enumerate(grads) if g is not None}
            self.prepare(options, touched)
            self.step(touched)
        finally:  # as the stock optimizer, interrupted, leaves what it has done
            self._store()

    def _load(self, tensors: Sequence[Tensor | None], chunks: Sequence[Sequence[Tensor]]) -> None:
        found = dict(enumerate(tensors))
        for plan, targets in zip(self._plans, chunks):
            flat = plan.flatten(found, self.params[plan.slots[0].index].device)
            for target, chunk in zip(targets, flat.chunk(len(targets))):
                comm.fill(target, chunk)

    def _store(self) -> None:
        for plan, sources in zip(self._plans, self._values):
            members = [self.params[slot.index] for slot in plan.slots]
            flat = torch.empty(plan.numel, dtype=plan.dtype, device=members[0].device)
            for source, chunk in zip(sources, flat.chunk(len(sources))):
                comm.fill(chunk, source)
            foreach_copy_(members, plan.views(flat))


def _shape_of(p: Tensor) -> tuple[Any, ...]:
    return p.shape, p.dtype, p.device, p.stride(), p.requires_grad
