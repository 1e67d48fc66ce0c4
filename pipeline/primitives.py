"""The table of primitives: for each, its shape/dtype rule and its meaning in NumPy.

Integer semantics, the same on every target:

* int32 and int64 wrap around (two's complement);
* `floordiv` and `mod` round towards minus infinity (the remainder has the divisor's sign), and
  x // 0 = 0, x % 0 = 0; the one overflow, min // -1, wraps to min;
* `gather` outside the operand (also at a negative index) gives `fill` and reads nothing;
* `scatter` outside the operand writes nothing; of several updates to one element the last one wins;
* a reduction over nothing gives its identity (sum 0, max the type's least value, min its greatest).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .ir import DTYPES, Aval, Dim, Extent

Params = dict[str, Any]
Shape = tuple[int, ...]
Rule = Callable[[Sequence[Aval], Params], tuple[Aval, ...]]
Eval = Callable[[list[np.ndarray], Params, list[Shape]], Any]


@dataclass(frozen=True)
class Primitive:
    """rule: (operand avals, params) -> result avals. numpy: (arrays, params, result shapes) ->
    arrays.

    aligned: which operands are read at the same index that is being written (elementwise); the
    others are read at computed places, so they must be complete before this node starts.
    """

    name: str
    rule: Rule
    numpy: Eval
    aligned: Callable[[int], bool] = lambda position: True
    loop: str = "elementwise"


PRIMITIVES: dict[str, Primitive] = {}


def _define(name: str, rule: Rule, numpy: Eval, **more: Any) -> None:
    PRIMITIVES[name] = Primitive(name, rule, numpy, **more)


def _need(ok: bool, text: str) -> None:
    if not ok:
        raise TypeError(text)


# -- elementwise ------------------------------------------------------------------------------


def _same(avals: Sequence[Aval]) -> tuple[Extent, ...]:
    """The common shape of elementwise operands; scalars go with anything."""
    shapes = {aval.shape for aval in avals if aval.shape}
    _need(len(shapes) <= 1, f"shapes differ: {', '.join(map(str, avals))}")
    return shapes.pop() if shapes else ()


def _same_dtype(avals: Sequence[Aval]) -> str:
    dtypes = {aval.dtype for aval in avals}
    _need(len(dtypes) == 1, f"dtypes differ: {', '.join(map(str, avals))}; use cast()")
    return dtypes.pop()


def _unit(avals: Sequence[Aval]) -> str | None:
    """An id plus or minus a plain number stays an id of its kind; two kinds do not mix."""
    units = {aval.unit for aval in avals if aval.unit is not None}
    _need(len(units) <= 1, f"ids of different kinds: {' and '.join(sorted(units))}")
    return units.pop() if units else None


def _arith(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    dtype = _same_dtype(avals)
    _need(dtype != "bool", "arithmetic on bool; use select() or cast()")
    return (Aval(_same(avals), dtype, _unit(avals)),)


def _scaled(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    (aval,) = _arith([Aval(a.shape, a.dtype) for a in avals], params)
    return (aval,)


def _bitwise(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    return (Aval(_same(avals), _same_dtype(avals)),)


def _compare(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    _same_dtype(avals)
    _unit(avals)
    return (Aval(_same(avals), "bool"),)


def _select(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    _need(avals[0].dtype == "bool", f"select() needs a bool condition, got {avals[0]}")
    return (Aval(_same(avals), _same_dtype(avals[1:]), _unit(avals[1:])),)


def _cast(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    _need(params["dtype"] in DTYPES, f"dtype must be one of {sorted(DTYPES)}")
    return (Aval(avals[0].shape, params["dtype"], avals[0].unit),)


def floordiv(a: Any, b: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b))).astype(a.dtype)


def mod(a: Any, b: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.where(b == 0, 0, np.mod(a, np.where(b == 0, 1, b))).astype(a.dtype)


def _ufunc(fn: Callable[..., Any]) -> Eval:
    def run(args: list[np.ndarray], params: Params, shapes: list[Shape]) -> Any:
        with np.errstate(all="ignore"):
            return np.broadcast_to(fn(*args), shapes[0])

    return run


_ARITH: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
}
_SCALED: dict[str, Callable[..., Any]] = {
    "mul": np.multiply,
    "floordiv": floordiv,
    "mod": mod,
    "neg": np.negative,
}
_BITS: dict[str, Callable[..., Any]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}
_COMPARE: dict[str, Callable[..., Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
for _rule, _table in (
    (_arith, _ARITH),
    (_scaled, _SCALED),
    (_bitwise, _BITS),
    (_compare, _COMPARE),
):
    for _name, _fn in _table.items():
        _define(_name, _rule, _ufunc(_fn))
_define("select", _select, _ufunc(np.where))
_define(
    "cast",
    _cast,
    lambda args, params, shapes: args[0].astype(DTYPES[params["dtype"]]),
)
_define("copy", lambda avals, params: (avals[0],), lambda args, params, shapes: args[0])


# -- shape ------------------------------------------------------------------------------------


def _iota(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    _need(len(params["shape"]) == 1, "iota() counts along one dim")
    return (Aval(params["shape"], params["dtype"]),)


def _broadcast(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    shape, axes = params["shape"], params["axes"]
    for have, axis in zip(avals[0].shape, axes, strict=True):
        _need(have in (shape[axis], 1), f"cannot broadcast {avals[0]} to [{_dims(shape)}]")
    return (Aval(shape, avals[0].dtype, avals[0].unit),)


def _dims(shape: Sequence[Extent]) -> str:
    return ",".join(map(str, shape))


def _broadcast_numpy(args: list[np.ndarray], params: Params, shapes: list[Shape]) -> Any:
    x, axes = args[0], params["axes"]
    view = [1] * len(shapes[0])
    for size, axis in zip(x.shape, axes, strict=True):
        view[axis] = size
    return np.broadcast_to(x.reshape(view), shapes[0])


_define("iota", _iota, lambda args, params, shapes: np.arange(shapes[0][0]).astype(params["dtype"]))
_define("broadcast", _broadcast, _broadcast_numpy, aligned=lambda position: False)
_define(
    "extent",  # the actual extent of a dim, as a scalar
    lambda avals, params: (Aval((), params["dtype"]),),
    lambda args, params, shapes: np.asarray(params["size"], DTYPES[params["dtype"]]),
)


# -- gather, scatter --------------------------------------------------------------------------


def _check_indices(indices: Sequence[Aval], axes: Sequence[str | None]) -> None:
    for axis, index in zip(axes, indices, strict=True):
        _need(index.dtype in ("int32", "int64"), f"an index must be an integer, got {index}")
        _need(
            axis is None or index.unit is None or axis == index.unit,
            f"index counts {index.unit}s, the operand's axis {axis}s",
        )


def _gather(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    operand, fill, *indices = avals
    rank = len(operand.shape)
    _need(len(indices) == rank, f"gather from {operand} needs {rank} indices, got {len(indices)}")
    _need(fill.dtype == operand.dtype, f"fill is {fill.dtype}, the operand {operand.dtype}")
    _check_indices(indices, params["axes"])
    return (Aval(_same(indices), operand.dtype, operand.unit),)


def _inside(indices: Sequence[np.ndarray], shape: Shape) -> Any:
    ok: Any = True
    for index, size in zip(indices, shape, strict=True):
        ok = ok & (index >= 0) & (index < size)
    return ok


def _gather_numpy(args: list[np.ndarray], params: Params, shapes: list[Shape]) -> Any:
    operand, fill, *indices = args
    ok = np.broadcast_to(_inside(indices, operand.shape), shapes[0])
    if operand.size == 0:
        return np.full(shapes[0], fill, operand.dtype)
    safe = tuple(np.where(ok, index, 0) for index in indices)
    return np.where(ok, operand[safe], fill).astype(operand.dtype)


def _scatter(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    operand, update, *indices = avals
    rank = len(operand.shape)
    _need(len(indices) == rank, f"scatter into {operand} needs {rank} indices")
    _need(update.dtype == operand.dtype, f"updates are {update.dtype}, operand {operand.dtype}")
    _check_indices(indices, params["axes"])
    _same([update, *indices])
    return (operand,)


def _scatter_numpy(args: list[np.ndarray], params: Params, shapes: list[Shape]) -> Any:
    operand, update, *indices = args
    out = operand.copy()
    arrays = [a.reshape(-1) for a in np.broadcast_arrays(update, *indices)]
    for value, *index in zip(*arrays, strict=True):
        if _inside(index, operand.shape):
            out[tuple(index)] = value
    return out


_define("gather", _gather, _gather_numpy, aligned=lambda position: position != 0)
_define("scatter", _scatter, _scatter_numpy, aligned=lambda position: False, loop="opaque")


# -- scans and reductions ---------------------------------------------------------------------


def _cumsum(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    (x,) = avals
    _need(len(x.shape) >= 1, "cumsum() needs at least one dim")
    _need(x.dtype != "bool", "cumsum() of bool; cast() it first")
    mode = params["mode"]
    _need(mode in ("inclusive", "exclusive", "offsets"), f"unknown cumsum mode {mode!r}")
    if mode == "offsets":
        _need(len(x.shape) == 1, "cumsum(mode='offsets') takes one dim")
        last = x.shape[0]
        _need(isinstance(last, (int, Dim)), "cumsum(mode='offsets') of a per-group extent")
        return (Aval((last + 1,), x.dtype),)  # type: ignore[operator]
    return (Aval(x.shape, x.dtype),)


def _cumsum_numpy(args: list[np.ndarray], params: Params, shapes: list[Shape]) -> Any:
    x = args[0]
    total = np.cumsum(x, axis=-1, dtype=x.dtype)
    if params["mode"] == "inclusive":
        return total
    if params["mode"] == "exclusive":
        return total - x
    return np.concatenate([np.zeros(1, x.dtype), total])


_REDUCERS: dict[str, Callable[..., Any]] = {
    "sum": np.add.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
}


def identity(op: str, dtype: str) -> int:
    """What a reduction starts from."""
    if op == "sum":
        return 0
    if dtype == "bool":
        return 0 if op == "max" else 1
    info: Any = np.iinfo(dtype)
    return int(info.min if op == "max" else info.max)


def _reduce(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    (x,) = avals
    _need(len(x.shape) >= 1, "a reduction needs at least one dim")
    _need(params["op"] in _REDUCERS, f"unknown reduction {params['op']!r}")
    _need(x.dtype != "bool" or params["op"] != "sum", "sum of bool; cast() it first")
    return (Aval(x.shape[:-1], x.dtype),)


def _reduce_numpy(args: list[np.ndarray], params: Params, shapes: list[Shape]) -> Any:
    x, op = args[0], params["op"]
    start = identity(op, x.dtype.name)
    return _REDUCERS[op](x, axis=-1, dtype=x.dtype, initial=x.dtype.type(start))


_define("cumsum", _cumsum, _cumsum_numpy, loop="scan")
_define("reduce", _reduce, _reduce_numpy, loop="reduce")


# -- ragged -----------------------------------------------------------------------------------


def _segment_ids(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    (offsets,) = avals
    _need(len(offsets.shape) == 1, f"segment_ids() takes offsets of one dim, got {offsets}")
    _need(len(params["shape"]) == 1, "segment_ids() gives one dim")
    return (Aval(params["shape"], "int32"),)


def _segment_ids_numpy(args: list[np.ndarray], params: Params, shapes: list[Shape]) -> Any:
    ends = np.maximum.accumulate(args[0][1:]) if args[0].size > 1 else args[0][1:]
    return np.searchsorted(ends, np.arange(shapes[0][0]), side="right").astype(np.int32)


def _compact(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    (mask,) = avals
    _need(mask.dtype == "bool" and len(mask.shape) == 1, f"compact() needs a bool mask, got {mask}")
    return (Aval(mask.shape, "int32"),)


def _compact_numpy(args: list[np.ndarray], params: Params, shapes: list[Shape]) -> Any:
    out = np.full(shapes[0], params["fill"], np.int32)
    (found,) = np.nonzero(args[0])
    out[: found.size] = found
    return out


_define("segment_ids", _segment_ids, _segment_ids_numpy, aligned=lambda p: False, loop="opaque")
_define("compact", _compact, _compact_numpy, aligned=lambda p: False, loop="opaque")


# -- kernels and inputs -----------------------------------------------------------------------


def _kernel_params(params: Params) -> Params:
    return {k: v for k, v in params.items() if k != "kernel"}


def _custom(avals: Sequence[Aval], params: Params) -> tuple[Aval, ...]:
    return params["kernel"].rule(avals, _kernel_params(params))


def _custom_numpy(args: list[np.ndarray], params: Params, shapes: list[Shape]) -> Any:
    return params["kernel"].run_reference(args, _kernel_params(params))


def _no_eval(args: list[np.ndarray], params: Params, shapes: list[Shape]) -> Any:
    raise AssertionError("inputs are bound, not evaluated")


_define("custom_call", _custom, _custom_numpy, aligned=lambda position: False, loop="opaque")
_define("input", lambda avals, params: (params["aval"],), _no_eval)
