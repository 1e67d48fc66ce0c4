"""Block-table kernels: one meaning (`reference`), one signature, one implementation per target.

`KERNELS[name]` is the kernel as a graph reaches it, by `stepgraph.custom_call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepgraph.pipeline.custom_call import Kernel
from stepgraph.pipeline.ir import Aval

from . import reference

_Avals = Sequence[Aval]
_Params = dict[str, Any]


def _check(ok: bool, text: str) -> None:
    if not ok:
        raise TypeError(text)


def _is_table(table: Aval) -> None:
    _check(len(table.shape) == 2 and table.dtype == "int32", f"not a block table: {table}")


def _vector(aval: Aval, dtype: str, what: str) -> None:
    _check(len(aval.shape) == 1 and aval.dtype == dtype, f"{what} must be {dtype}, got {aval}")


def _ids(aval: Aval, unit: str, what: str) -> None:
    _check(aval.unit in (None, unit), f"{what} must count {unit}s, they count {aval.unit}s")


def _update_rule(avals: _Avals, params: _Params) -> tuple[Aval, ...]:
    table, counts, ops, offsets, ids = avals
    _is_table(table)
    _vector(counts, "int32", "counts")
    _check(counts.shape[0] == table.shape[0], f"counts of {counts} for a table {table}")
    _check(
        ops.dtype == "int32" and len(ops.shape) == 2 and ops.shape[1] == reference.OP_WIDTH,
        f"updates must be int32 (U, {reference.OP_WIDTH}), got {ops}",
    )
    _vector(offsets, "int32", "offsets")
    _vector(ids, "int32", "block ids")
    return table, counts


def _gather_rule(avals: _Avals, params: _Params) -> tuple[Aval, ...]:
    table, counts, rows = avals
    _is_table(table)
    _vector(counts, "int32", "counts")
    _vector(rows, "int32", "rows")
    _ids(rows, "row", "rows")
    return (Aval((rows.shape[0], table.shape[1]), "int32", table.unit),)


def _table_attrs(avals: _Avals, params: _Params) -> tuple[Any, ...]:
    return tuple(avals[0].shape)


def _slot_rule(avals: _Avals, params: _Params) -> tuple[Aval, ...]:
    table, rows, positions = avals
    _is_table(table)
    _vector(rows, "int32", "rows")
    _ids(rows, "row", "rows")
    _vector(positions, "int64", "positions")
    _check(rows.shape == positions.shape, f"{rows} rows for {positions} positions")
    size, rank, interleave = params["cp_size"], params["cp_rank"], params["cp_interleave"]
    _check(params["block_size"] >= 1, "block_size must be at least 1")
    _check(size >= 1 and 0 <= rank < size, f"rank {rank} of {size} context-parallel ranks")
    virtual = params["block_size"] * size
    _check(virtual < 2**31, f"a virtual block of {virtual} tokens; the limit is {2**31 - 1}")
    _check(
        interleave >= 1 and params["block_size"] % interleave == 0,
        f"cp_interleave {interleave} must divide block_size {params['block_size']}",
    )
    return (Aval(positions.shape, "int64", "slot"),)


def _slot_attrs(avals: _Avals, params: _Params) -> tuple[Any, ...]:
    names = ("block_size", "cp_size", "cp_rank", "cp_interleave", "ring")
    return (*avals[0].shape, *(int(params[name]) for name in names))


def _targets(name: str) -> dict[str, str]:
    return {
        "cpu": f"stepgraph.kernels.cpu:{name}",
        "cuda": f"stepgraph.kernels/block_tables.cu:kernel_{name}",
        "numba-cuda": f"stepgraph.kernels.numba_cuda:kernel_{name}",
        "triton": f"stepgraph.kernels.triton:kernel_{name}",
        "jax": f"stepgraph.kernels.jax:{name}",
    }


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "update_block_table",
            rule=_update_rule,
            reference=reference.update_block_table,
            extents=lambda avals: (avals[2].shape[0], avals[4].shape[0]),
            attrs=lambda avals, params: (params["group"], *avals[0].shape),
            targets=_targets("update_block_table"),
            in_place=((0, 0), (1, 1)),
        ),
        Kernel(
            "gather_block_table",
            rule=_gather_rule,
            reference=reference.gather_block_table,
            extents=lambda avals: (avals[2].shape[0],),
            attrs=_table_attrs,
            targets=_targets("gather_block_table"),
        ),
        Kernel(
            "slot_mapping",
            rule=_slot_rule,
            reference=reference.slot_mapping,
            extents=lambda avals: (avals[1].shape[0],),
            attrs=_slot_attrs,
            targets=_targets("slot_mapping"),
        ),
    )
}

__all__ = ["KERNELS", "Kernel", "reference"]
