"""The functions that stages use on traced values, beside their operators."""

from __future__ import annotations

from typing import Any

from .errors import TraceError
from .ir import Extent
from .trace import Step
from .value import Scalar, Value


def _step_of(*args: Any) -> Step:
    for a in args:
        if isinstance(a, Value):
            return a.step
    raise TraceError("expected at least one traced value")


def select(condition: Value, a: Scalar, b: Scalar) -> Value:
    """`a` where `condition` holds, else `b`, elementwise."""
    return _step_of(condition, a, b).apply("select", [condition, a, b])


def minimum(a: Scalar, b: Scalar) -> Value:
    """The smaller of two, elementwise."""
    return _step_of(a, b).apply("min", [a, b])


def maximum(a: Scalar, b: Scalar) -> Value:
    """The larger of two, elementwise."""
    return _step_of(a, b).apply("max", [a, b])


def gather(operand: Value, *indices: Scalar, fill: Scalar = 0) -> Value:
    """operand[indices], one index per dim; `fill` where an index is negative or out of range."""
    return _step_of(operand, *indices).gather(operand, indices, fill)


def scatter(state: Value, update: Scalar, *indices: Value) -> Value:
    """`state` with `update` written at `indices`; out of range writes nothing, the last one
    wins."""
    return _step_of(state, *indices).scatter(state, update, indices)


def cumsum(x: Value, mode: str = "inclusive") -> Value:
    """Running sums along the last dim. mode "exclusive" starts at 0; "offsets" has one more
    entry."""
    return x.step.apply("cumsum", [x], mode=mode)


def reduce_sum(x: Value) -> Value:
    """Sum over the last dim."""
    return x.step.apply("reduce", [x], op="sum")


def reduce_max(x: Value) -> Value:
    """Greatest of the last dim (of nothing: the type's least value)."""
    return x.step.apply("reduce", [x], op="max")


def reduce_min(x: Value) -> Value:
    """Least of the last dim (of nothing: the type's greatest value)."""
    return x.step.apply("reduce", [x], op="min")


def segment_ids(offsets: Value, size: Extent) -> Value:
    """For t = 0, 1, ...: the segment i with offsets[i] <= t < offsets[i + 1]; past the last offset,
    the number of segments. Offsets must not decrease."""
    return offsets.step._node("segment_ids", [offsets], {"shape": (size,)})


def compact(mask: Value, fill: int) -> Value:
    """Positions of the true entries, in order, then `fill` up to the mask's extent (int32)."""
    return mask.step.apply("compact", [mask], fill=int(fill))


def custom_call(kernel: Any, *operands: Value, **params: Any) -> Any:
    """Apply a hand-written kernel; one value, or a list if the kernel has several results."""
    step = _step_of(*operands)
    values = step.nodes_of("custom_call", operands, {"kernel": kernel, **params})
    return values[0] if len(values) == 1 else values
