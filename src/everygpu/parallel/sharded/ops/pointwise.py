"""Pointwise operations with broadcasting, and their in-place forms."""

from typing import Any

from torch import Tensor

from everygpu.parallel.sharded.batch import ShardedBatch, has_shards, was_joined
from everygpu.parallel.sharded.dispatch import Args, Kwargs, Rule, rules_for
from everygpu.parallel.sharded.operands import call_on_parts, shard_operand, shared_spec, wrap_results


def pointwise(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Pointwise operations, with broadcasting."""
    spec = shared_spec(*args)
    if spec is None or (kwargs and any(isinstance(v, Tensor) for v in kwargs.values())):
        return NotImplemented
    parts = call_on_parts(func, [shard_operand(a, spec) for a in args], kwargs, spec.layout)
    return NotImplemented if parts is None else wrap_results(spec, parts)


def in_place(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """In-place pointwise operations: replace the parts of a batch that has no views and was never joined."""
    x, *others = args
    if not isinstance(x, ShardedBatch) or x._memory.is_viewed or was_joined(x) or not has_shards(x):
        return NotImplemented
    spec = shared_spec(*args)
    if spec is None or (kwargs and any(isinstance(v, Tensor) for v in kwargs.values())):
        return NotImplemented
    fresh = [p.clone() for p in x._parts]
    parts = call_on_parts(func, [fresh, *(shard_operand(a, spec) for a in others)], kwargs, spec.layout)
    if parts is None:
        return NotImplemented
    x._parts, x._kept = tuple(parts), None
    return x


UNARY = (
    "abs acos acosh angle asin asinh atan atanh bitwise_not ceil clamp clamp_max clamp_min cos cosh deg2rad digamma "
    "erf erfc erfinv exp exp2 expm1 floor frac hardshrink hardsigmoid hardswish hardtanh isinf isnan isneginf "
    "isposinf leaky_relu lgamma log log10 log1p log2 logical_not logit mish nan_to_num neg rad2deg reciprocal relu "
    "round rsqrt sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold trunc "
    "celu elu gelu log_sigmoid_forward conj_physical selu isfinite"
)
BINARY = (
    "add.Tensor add.Scalar addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor copysign div eq.Tensor eq.Scalar "
    "floor_divide fmax fmin fmod.Tensor fmod.Scalar ge gt hypot le lerp logaddexp logaddexp2 logical_and logical_or "
    "logical_xor lt masked_fill maximum minimum mul.Tensor mul.Scalar ne.Tensor ne.Scalar pow.Tensor_Tensor "
    "pow.Tensor_Scalar pow.Scalar remainder rsub sub.Tensor sub.Scalar where.self where.ScalarOther where.ScalarSelf "
    "where.Scalar xlogy _prelu_kernel"
)
GRADIENTS = (
    "elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward "
    "leaky_relu_backward logit_backward log_sigmoid_backward mish_backward sigmoid_backward silu_backward "
    "softplus_backward softshrink_backward tanh_backward threshold_backward _prelu_kernel_backward"
)
WRITING = (
    "abs_ add_ addcdiv_ addcmul_ clamp_ clamp_max_ clamp_min_ copy_.default div_ exp_ fill_ floor_ log_ masked_fill_ "
    "mul_ neg_ pow_ relu_ round_ sigmoid_ sqrt_ sub_ tanh_ zero_"
)

POINTWISE: dict[Any, Rule] = rules_for((pointwise, f"{UNARY} {BINARY} {GRADIENTS}"), (in_place, WRITING))
