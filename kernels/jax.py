"""The kernels for JAX, on padded arrays, one KV-cache group at a time. `extents`: the actual
extents that the kernel asks for (see `stepgraph.pipeline.custom_call`), as traced scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .reference import NULL_BLOCK, PAD_SLOT, Op


def update_block_table(
    extents: Sequence[Any], table: Any, counts: Any, ops: Any, offsets: Any, ids: Any, *, group: int
) -> tuple[Any, Any]:
    num_ops, num_ids = extents
    rows, width = table.shape
    if not rows or not width or not ops.shape[0]:
        return table, counts
    columns = jnp.arange(width)

    def put(table: Any, counts: Any, row: Any, at: Any, start: Any, length: Any) -> tuple[Any, Any]:
        new = columns - at  # the place in the ids of each column
        given = jnp.take(ids, jnp.clip(start + new, 0, max(ids.shape[0] - 1, 0)), mode="clip")
        line = jnp.where(new < 0, table[row], NULL_BLOCK)
        line = jnp.where((new >= 0) & (new < length), jnp.maximum(given, NULL_BLOCK), line)
        fits = at + length <= width
        return (
            table.at[row].set(jnp.where(fits, line, table[row])),
            counts.at[row].set(jnp.where(fits, (at + length).astype(counts.dtype), counts[row])),
        )

    def one(k: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        kind, row, other, start, length = (ops[k, i].astype(jnp.int64) for i in range(5))
        valid = (row >= 0) & (row < rows)
        pair = valid & (other >= 0) & (other < rows) & (other != row)
        listed = valid & (start >= 0) & (length >= 0) & (start + length <= num_ids)
        row, other = jnp.clip(row, 0, rows - 1), jnp.clip(other, 0, rows - 1)

        def append(state: tuple[Any, Any]) -> tuple[Any, Any]:
            have = jnp.clip(state[1][row].astype(jnp.int64), 0, width)
            return put(state[0], state[1], row, have, start, length)

        def move(state: tuple[Any, Any]) -> tuple[Any, Any]:
            table, counts = state
            table, counts = table.at[other].set(table[row]), counts.at[other].set(counts[row])
            return put(table, counts, row, 0, 0, jnp.int64(0))

        def swap(state: tuple[Any, Any]) -> tuple[Any, Any]:
            table, counts = state
            both, turned = jnp.stack([row, other]), jnp.stack([other, row])
            return table.at[both].set(table[turned]), counts.at[both].set(counts[turned])

        cases = [
            (Op.APPEND, listed, append),
            (Op.SET, listed, lambda state: put(state[0], state[1], row, 0, start, length)),
            (Op.MOVE, pair, move),
            (Op.SWAP, pair, swap),
            (Op.CLEAR, valid, lambda state: put(state[0], state[1], row, 0, 0, jnp.int64(0))),
        ]
        which = sum(jnp.where((kind == op) & ok, i + 1, 0) for i, (op, ok, _) in enumerate(cases))
        return lax.switch(which, [lambda state: state, *(case for _, _, case in cases)], state)

    first = jnp.clip(offsets[group], 0, num_ops)
    last = jnp.clip(offsets[group + 1], 0, num_ops)
    out: tuple[Any, Any] = lax.fori_loop(first, jnp.maximum(first, last), one, (table, counts))
    return out


def gather_block_table(extents: Sequence[Any], table: Any, counts: Any, rows: Any) -> Any:
    if not table.size:
        return jnp.zeros((rows.shape[0], table.shape[1]), table.dtype)
    valid = (rows >= 0) & (rows < table.shape[0])
    row = jnp.clip(rows, 0, table.shape[0] - 1)
    count = jnp.where(valid, counts[row], 0)
    return jnp.where(jnp.arange(table.shape[1]) < count[:, None], table[row], NULL_BLOCK)


def slot_mapping(
    extents: Sequence[Any],
    table: Any,
    rows: Any,
    positions: Any,
    *,
    block_size: int,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    ring: bool = False,
) -> Any:
    if not table.size:
        return jnp.full(rows.shape, PAD_SLOT, jnp.int64)
    valid = (rows >= 0) & (rows < table.shape[0]) & (positions >= 0)
    column, offset = jnp.divmod(positions, block_size * cp_size)
    if ring:
        column = column % table.shape[1]
    valid &= column < table.shape[1]
    valid &= (offset // cp_interleave) % cp_size == cp_rank
    local = offset // (cp_size * cp_interleave) * cp_interleave + offset % cp_interleave
    block = table[jnp.where(valid, rows, 0), jnp.where(valid, column, 0)].astype(jnp.int64)
    return jnp.where(valid & (block >= 0), block * block_size + local, PAD_SLOT)
