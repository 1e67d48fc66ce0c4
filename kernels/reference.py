"""What the kernels mean, in NumPy, one KV-cache group at a time. Every implementation equals this.

A block table is int32 (rows, W): row r holds the block ids of one request, `counts[r]` of them.
Entries past a row's count are 0, the null block, after every update: a row taken over by a shorter
request never shows the longer one's blocks.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

NULL_BLOCK = 0
PAD_SLOT = -1


class Op(IntEnum):
    """Kinds of block-table updates; column 0 of an update list."""

    APPEND = 0
    SET = 1
    MOVE = 2
    SWAP = 3
    CLEAR = 4


OP_WIDTH = 5  # kind, row, other row, first id, number of ids


def update_block_table(
    table: np.ndarray,
    counts: np.ndarray,
    ops: np.ndarray,
    offsets: np.ndarray,
    ids: np.ndarray,
    *,
    group: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The group's table and counts after its updates, in order.

    table int32 (R, W); counts int32 (R,); ops int32 (U, 5), sorted by group, those of `group` at
    offsets[group]:offsets[group + 1]; offsets int32 (G + 1,); ids int32 (N,).

    APPEND row ids: behind the row's blocks. SET row ids: instead of them. MOVE row other: `other`
    becomes the row, the row becomes empty. SWAP row other. CLEAR row.
    An update that is not possible is left out whole: a row out of range, ids outside `ids`, more
    blocks than the table is wide. A negative id is written as the null block.
    """
    table, counts = table.copy(), counts.copy()
    rows, width = table.shape

    def put(row: int, at: int, new: np.ndarray) -> None:
        if at + len(new) <= width:
            table[row, at : at + len(new)] = np.maximum(new, NULL_BLOCK)
            table[row, at + len(new) :] = NULL_BLOCK
            counts[row] = at + len(new)

    first = min(max(int(offsets[group]), 0), len(ops))
    last = min(max(int(offsets[group + 1]), 0), len(ops))
    for kind, row, other, start, length in ops[first:last].tolist():
        if not 0 <= row < rows:
            continue
        if kind in (Op.APPEND, Op.SET):
            if start < 0 or length < 0 or start + length > len(ids):
                continue
            at = min(max(int(counts[row]), 0), width) if kind == Op.APPEND else 0
            put(row, at, ids[start : start + length])
        elif kind == Op.CLEAR:
            put(row, 0, ids[:0])
        elif kind in (Op.MOVE, Op.SWAP) and 0 <= other < rows and other != row:
            if kind == Op.SWAP:
                table[[row, other]] = table[[other, row]]
                counts[[row, other]] = counts[[other, row]]
            else:
                table[other], counts[other] = table[row], counts[row]
                put(row, 0, ids[:0])
    return table, counts


def gather_block_table(table: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """int32 (B, W): the tables of the requests in `rows`, in that order.

    Columns past a row's count hold the null block, and so does a row out of range.
    """
    out = np.zeros((len(rows), table.shape[1]), np.int32)
    for b, row in enumerate(rows.tolist()):
        if 0 <= row < table.shape[0]:
            count = min(max(int(counts[row]), 0), table.shape[1])
            out[b, :count] = table[row, :count]
    return out


def slot_mapping(
    table: np.ndarray,
    rows: np.ndarray,
    positions: np.ndarray,
    *,
    block_size: int,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    ring: bool = False,
) -> np.ndarray:
    """int64 (T,): the cache slot of each token, table[row, column] * block_size + offset in it.

    rows int32 (T,), the table row of each token; positions int64 (T,).
    -1 where there is none: row or position out of range, a column past the table's width (unless
    `ring`, whose columns are taken in turn), a negative block id, another rank's token.
    Context parallel: a virtual block has block_size * cp_size tokens; the token at offset o of
    it is local iff (o // cp_interleave) % cp_size == cp_rank, and is then the
    (o // (cp_size * cp_interleave)) * cp_interleave + o % cp_interleave th of its block.
    """
    out = np.full(len(positions), PAD_SLOT, np.int64)
    virtual = block_size * cp_size
    for t, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        if not 0 <= row < table.shape[0] or position < 0:
            continue
        column, offset = divmod(position, virtual)
        if ring:
            column %= table.shape[1]
        if column >= table.shape[1] or (offset // cp_interleave) % cp_size != cp_rank:
            continue
        block = int(table[row, column])
        if block >= 0:
            local = offset // (cp_size * cp_interleave) * cp_interleave + offset % cp_interleave
            out[t] = block * block_size + local
    return out


def local_lengths(lengths: np.ndarray, size: int, rank: int, interleave: int = 1) -> np.ndarray:
    """How many of the first `lengths` tokens rank `rank` of `size` holds, dealt `interleave` at a
    time. Of each token's own bound (position + 1) this gives the local bound of that token: expand
    first, localise second.

    Formula: full rounds times interleave, plus the rank's share of the last, partial round (vLLM's
    get_dcp_local_seq_lens).
    """
    rounds, rest = np.divmod(lengths, size * interleave)
    share = np.clip(rest - rank * interleave, 0, interleave)
    return (rounds * interleave + share).astype(lengths.dtype)


def split_blocks(table: np.ndarray, ratio: int) -> np.ndarray:
    """int32 (B, W * ratio): the table in kernel blocks, `ratio` to an allocator block: block b is
    b * ratio, b * ratio + 1, ..."""
    spread = table[:, :, None] * ratio + np.arange(ratio, dtype=np.int32)
    return spread.reshape(table.shape[0], -1).astype(np.int32)
