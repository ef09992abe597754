"""Tensor subclasses, storages, and operations on lists of tensors."""

from typing import Any

import torch
from torch import Tensor

make_subclass = Tensor._make_subclass
"""Show a tensor's memory as another class's; ``as_subclass`` keeps the graph, where this one makes a leaf."""

make_wrapper_subclass = Tensor._make_wrapper_subclass
"""Make a tensor with a shape, a dtype and a device, but no memory: what DTensor and other subclasses are made by."""

throw_on_data_ptr = torch._C._set_throw_on_mutable_data_ptr
"""Have C++ code that takes a pointer into a tensor without memory raise, rather than read from nowhere."""


def num_storage_uses(x: Tensor) -> int:
    """Count the tensors, in Python and in graphs, that refer to a tensor's memory; as torch's own CUDA graph trees."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


reshape_alias: Any = torch.ops.aten._reshape_alias.default
"""View a tensor as it is, by an operation for which ``ShardedBatch`` has no rule: ``aten.alias`` has one."""


swap_tensors = torch._C._swap_tensor_impl
"""Exchange what two tensors are, in C++; ``torch.utils.swap_tensors`` refuses tensors that have views."""

foreach_copy_ = torch._foreach_copy_
"""Copy a list of tensors into another in one launch."""

foreach_mul_ = torch._foreach_mul_
"""Multiply each tensor of a list in one launch."""

foreach_norm = torch._foreach_norm
"""Return each tensor's norm; ``torch.nn.utils.get_total_norm`` returns one for all of them."""

unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply gradients by a scale's inverse and note what isn't finite, as ``GradScaler`` does, for one optimizer."""

update_scale_ = torch._amp_update_scale_
"""Grow or shrink a loss scale, as ``GradScaler.update`` does, without waiting for the device."""
