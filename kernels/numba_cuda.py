"""The block-table kernels for Numba-CUDA: block_tables.cu in Python. All threads of a launch call
them."""

from __future__ import annotations

from numba import cuda

from stepgraph.pipeline.lower.numba_cuda_memory import (
    device,
    div32,
    div64,
    i64,
    imax,
    imin,
    ld4,
    ld8,
    st4,
    st8,
)


@device
def kernel_update_block_table(  # type: ignore[no-untyped-def]
    n, num_ops, num_ids, table, counts, ops, offsets, ids, out, out_counts, attrs
):
    """One block per group; its threads share the columns. attrs: group, rows, width."""
    lane, lanes = i64(cuda.threadIdx.x), i64(cuda.blockDim.x)
    ops_list, starts, pool = ld8(ops, 0), ld8(offsets, 0), ld8(ids, 0)
    for g in range(i64(cuda.blockIdx.x), n, i64(cuda.gridDim.x)):
        group, rows, width = ld8(attrs, 3 * g), ld8(attrs, 3 * g + 1), ld8(attrs, 3 * g + 2)
        base, stride, num = ld8(table, 2 * g), 4 * ld8(table, 2 * g + 1), ld8(counts, 2 * g)
        first = imin(imax(ld4(starts, group), 0), num_ops)
        last = imin(ld4(starts, group + 1), num_ops)
        for k in range(first, last):
            kind, r, other = (
                ld4(ops_list, 5 * k),
                ld4(ops_list, 5 * k + 1),
                ld4(ops_list, 5 * k + 2),
            )
            start, length = ld4(ops_list, 5 * k + 3), ld4(ops_list, 5 * k + 4)
            put, pair = kind == 0 or kind == 1, kind == 2 or kind == 3
            possible = r >= 0 and r < rows
            if put:
                possible = possible and start >= 0 and length >= 0 and start + length <= num_ids
            elif pair:
                possible = possible and other >= 0 and other < rows and other != r
            else:
                possible = possible and kind == 4
            count, other_count = i64(0), i64(0)
            if possible:
                count = ld4(num, r)
                if pair:
                    other_count = ld4(num, other)
            row, target = base + r * stride, base + other * stride
            cuda.syncthreads()  # the counts are read, the previous update is written
            if not possible:
                continue
            if pair:
                for c in range(lane, width, lanes):
                    mine = ld4(row, c)
                    theirs = ld4(target, c) if kind == 3 else i64(0)
                    st4(target, c, mine)
                    st4(row, c, theirs)
                if lane == 0:
                    st4(num, other, count)
                    st4(num, r, other_count if kind == 3 else i64(0))
            else:
                at = imin(imax(count, 0), width) if kind == 0 else i64(0)
                size = length if put else i64(0)
                if at + size <= width:
                    for c in range(at + lane, width, lanes):
                        new = i64(0)
                        if c - at < size:
                            new = imax(ld4(pool, start + c - at), 0)
                        st4(row, c, new)
                    if lane == 0:
                        st4(num, r, at + size)
            cuda.syncthreads()


@device
def kernel_gather_block_table(n, num_reqs, table, counts, rows, out, attrs):  # type: ignore[no-untyped-def]
    """A team of 32 threads per row (of fewer, if the block is smaller). attrs: rows, width."""
    team = imin(i64(cuda.blockDim.x), 32)
    thread = i64(cuda.blockIdx.x) * i64(cuda.blockDim.x) + i64(cuda.threadIdx.x)
    first, lane = div32(thread, team), thread - div32(thread, team) * team
    teams = div32(i64(cuda.gridDim.x) * i64(cuda.blockDim.x), team)
    for k in range(first, n * num_reqs, teams):
        g = div32(k, num_reqs)
        b = k - g * num_reqs
        num_rows, width = ld8(attrs, 2 * g), ld8(attrs, 2 * g + 1)
        r = ld4(ld8(rows, 2 * g), b)
        count, source = i64(0), i64(0)
        if r >= 0 and r < num_rows:
            count = imin(imax(ld4(ld8(counts, 2 * g), r), 0), width)
            source = ld8(table, 2 * g) + r * 4 * ld8(table, 2 * g + 1)
        target = ld8(out, 2 * g) + b * 4 * ld8(out, 2 * g + 1)
        for c in range(lane, width, team):
            st4(target, c, ld4(source, c) if c < count else i64(0))


@device
def kernel_slot_mapping(n, num_tokens, table, rows, positions, out, attrs):  # type: ignore[no-untyped-def]
    """attrs: rows, width, block size, context-parallel size, rank, interleave, ring."""
    width_of_block = i64(cuda.blockDim.x)
    thread = i64(cuda.blockIdx.x) * width_of_block + i64(cuda.threadIdx.x)
    for k in range(thread, n * num_tokens, i64(cuda.gridDim.x) * width_of_block):
        g = div32(k, num_tokens)
        t, own = k - g * num_tokens, attrs + 56 * g
        num_rows, width, block_size = ld8(own, 0), ld8(own, 1), ld8(own, 2)
        size, rank, interleave = ld8(own, 3), ld8(own, 4), ld8(own, 5)
        virtual = block_size * size
        r, position, slot = ld4(ld8(rows, 2 * g), t), ld8(ld8(positions, 2 * g), t), i64(-1)
        if r >= 0 and r < num_rows and position >= 0:
            column = div64(position, virtual)
            offset = position - column * virtual
            if ld8(own, 6) != 0:
                column -= div64(column, width) * width
            local, mine = offset, True
            if size != 1:
                turn = div32(offset, interleave)
                lap = div32(turn, size)
                mine = turn - lap * size == rank
                local = lap * interleave + offset - turn * interleave
            if mine and column < width:
                block = ld4(ld8(table, 2 * g), r * ld8(table, 2 * g + 1) + column)
                if block >= 0:
                    slot = block * block_size + local
        st8(ld8(out, 2 * g), t, slot)
