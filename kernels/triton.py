"""The block-table kernels for Triton: block_tables.cu in tiles. All programs of a launch call
them."""

from __future__ import annotations

import triton
import triton.language as tl

from stepgraph.pipeline.lower.triton_memory import (
    TILE,
    choose,
    div32,
    div64,
    imax,
    imin,
    lanes,
    ld4,
    ld8,
    ldm4,
    st4,
    st8,
)


@triton.jit
def kernel_update_block_table(  # type: ignore[no-untyped-def]
    block, blocks, n, num_ops, num_ids, table, counts, ops, offsets, ids, out, out_counts, attrs
):
    """One program per group. attrs: group, rows, width."""
    ops_list = ld8(ops, 0)
    starts = ld8(offsets, 0)
    pool = ld8(ids, 0)
    for g in range(block, n, blocks):
        group = ld8(attrs, 3 * g)
        rows = ld8(attrs, 3 * g + 1)
        width = ld8(attrs, 3 * g + 2)
        base = ld8(table, 2 * g)
        stride = 4 * ld8(table, 2 * g + 1)
        num = ld8(counts, 2 * g)
        first = imin(imax(ld4(starts, group), 0), num_ops)
        last = imin(ld4(starts, group + 1), num_ops)
        for k in range(first, last):
            kind = ld4(ops_list, 5 * k)
            r = ld4(ops_list, 5 * k + 1)
            other = ld4(ops_list, 5 * k + 2)
            start = ld4(ops_list, 5 * k + 3)
            length = ld4(ops_list, 5 * k + 4)
            put = (kind == 0) | (kind == 1)
            pair = (kind == 2) | (kind == 3)
            fits = (start >= 0) & (length >= 0) & (start + length <= num_ids)
            two = (other >= 0) & (other < rows) & (other != r)
            possible = (r >= 0) & (r < rows)
            possible = possible & ((put & fits) | (pair & two) | (kind == 4))
            count = ldm4(num, r, possible, 0)
            other_count = ldm4(num, other, possible & pair, 0)
            row = base + choose(possible, r, 0) * stride
            target = base + choose(possible & pair, other, 0) * stride
            at = choose(kind == 0, imin(imax(count, 0), width), 0)
            size = choose(put, length, 0)
            whole = possible & (pair == 0) & (at + size <= width)
            tl.debug_barrier()  # the counts are read, the previous update is written
            for start_column in range(0, width, TILE):
                c = start_column + lanes()
                inside = c < width
                mine = ldm4(row, c, inside & possible & pair, 0)
                theirs = ldm4(target, c, inside & possible & (kind == 3), 0)
                new = ldm4(pool, start + c - at, inside & whole & (c >= at) & (c - at < size), 0)
                st4(target, c, mine, inside & possible & pair)
                st4(
                    row,
                    c,
                    choose(pair, theirs, imax(new, 0)),
                    inside & possible & (pair | whole) & (pair | (c >= at)),
                )
            st4(num, other, count, possible & pair)
            st4(num, r, choose(kind == 3, other_count, 0), possible & pair)
            st4(num, r, at + size, whole)
            tl.debug_barrier()


@triton.jit
def kernel_gather_block_table(  # type: ignore[no-untyped-def]
    block, blocks, n, num_reqs, table, counts, rows, out, attrs
):
    """One program per row. attrs: rows, width."""
    for k in range(block, n * num_reqs, blocks):
        g = div32(k, num_reqs)
        b = k - g * num_reqs
        num_rows = ld8(attrs, 2 * g)
        width = ld8(attrs, 2 * g + 1)
        r = ld4(ld8(rows, 2 * g), b)
        known = (r >= 0) & (r < num_rows)
        count = imin(imax(ldm4(ld8(counts, 2 * g), r, known, 0), 0), width)
        source = ld8(table, 2 * g) + choose(known, r, 0) * 4 * ld8(table, 2 * g + 1)
        target = ld8(out, 2 * g) + b * 4 * ld8(out, 2 * g + 1)
        for start in range(0, width, TILE):
            c = start + lanes()
            st4(target, c, ldm4(source, c, c < count, 0), c < width)


@triton.jit
def kernel_slot_mapping(  # type: ignore[no-untyped-def]
    block, blocks, n, num_tokens, table, rows, positions, out, attrs
):
    """attrs: rows, width, block size, context-parallel size, rank, interleave, ring."""
    total = n * num_tokens
    for base in range(block * TILE, total, blocks * TILE):
        k = base + lanes()
        on = k < total
        k = imin(k, total - 1)
        g = div32(k, num_tokens)
        t = k - g * num_tokens
        own = attrs + 56 * g
        num_rows = ld8(own, 0)
        width = ld8(own, 1)
        block_size = ld8(own, 2)
        size = ld8(own, 3)
        rank = ld8(own, 4)
        interleave = ld8(own, 5)
        virtual = block_size * size
        r = ld4(ld8(rows, 2 * g), t)
        position = ld8(ld8(positions, 2 * g), t)
        known = (r >= 0) & (r < num_rows) & (position >= 0)
        position = choose(known, position, 0)
        column = div64(position, virtual)
        offset = position - column * virtual
        column = choose(ld8(own, 6) != 0, column - div64(column, width) * width, column)
        turn = div32(offset, interleave)
        lap = div32(turn, size)
        mine = known & (turn - lap * size == rank) & (column < width)
        local = lap * interleave + offset - turn * interleave
        at = r * ld8(table, 2 * g + 1) + column
        found = ldm4(ld8(table, 2 * g), at, mine, -1)
        st8(ld8(out, 2 * g), t, choose(found >= 0, found * block_size + local, -1), on)
