"""The kernels for the CPU, compiled by Numba into the step's one native function.

Arguments are int64 (see `stepgraph.pipeline.custom_call`): n groups, the extents, for each array
the address of a table of (address, row stride) per group, and the groups' static integers.
"""

from __future__ import annotations

from numba import njit

from stepgraph.pipeline.lower.memory import div32, fill4, imax, imin, ld4, ld8, st4, st8


@njit(error_model="numpy")
def _copy4(target, source, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        st4(target, i, ld4(source, i))


@njit(error_model="numpy")
def _swap4(a, b, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        x = ld4(a, i)
        st4(a, i, ld4(b, i))
        st4(b, i, x)


@njit(error_model="numpy")
def _put(row, counts, r, at, ids, length, width):  # type: ignore[no-untyped-def]
    """Write `length` ids from column `at` on and the null block up to the old count."""
    if at + length > width:
        return
    for i in range(length):
        st4(row, at + i, imax(ld4(ids, i), 0))
    fill4(row, at + length, width, 0)
    st4(counts, r, at + length)


@njit(error_model="numpy")
def update_block_table(  # type: ignore[no-untyped-def]
    n, num_ops, num_ids, table, counts, ops, offsets, ids, out, out_counts, attrs
):
    """attrs: group, rows, width. `out` and `out_counts` are `table` and `counts` (in place)."""
    list_ops, list_ids = ld8(ops, 0), ld8(ids, 0)
    starts = ld8(offsets, 0)
    for g in range(n):
        group, rows, width = ld8(attrs, 3 * g), ld8(attrs, 3 * g + 1), ld8(attrs, 3 * g + 2)
        base, stride, num = ld8(table, 2 * g), 4 * ld8(table, 2 * g + 1), ld8(counts, 2 * g)
        first = imin(imax(ld4(starts, group), 0), num_ops)
        last = imin(ld4(starts, group + 1), num_ops)
        for k in range(first, last):
            kind, r, other = (
                ld4(list_ops, 5 * k),
                ld4(list_ops, 5 * k + 1),
                ld4(list_ops, 5 * k + 2),
            )
            start, length = ld4(list_ops, 5 * k + 3), ld4(list_ops, 5 * k + 4)
            if r < 0 or r >= rows:
                continue
            row = base + r * stride
            if kind <= 1:
                if kind >= 0 and start >= 0 and length >= 0 and start + length <= num_ids:
                    at = imin(imax(ld4(num, r), 0), width) if kind == 0 else 0
                    _put(row, num, r, at, list_ids + 4 * start, length, width)
            elif kind == 4:
                _put(row, num, r, 0, list_ids, 0, width)
            elif kind <= 3 and other >= 0 and other < rows and other != r:
                target = base + other * stride
                if kind == 3:
                    _swap4(row, target, width)
                    _swap4(num + 4 * r, num + 4 * other, 1)
                else:
                    _copy4(target, row, width)
                    st4(num, other, ld4(num, r))
                    _put(row, num, r, 0, list_ids, 0, width)


@njit(error_model="numpy")
def gather_block_table(n, num_reqs, table, counts, rows, out, attrs):  # type: ignore[no-untyped-def]
    """attrs: rows, width."""
    for g in range(n):
        num_rows, width = ld8(attrs, 2 * g), ld8(attrs, 2 * g + 1)
        base, stride, num = ld8(table, 2 * g), 4 * ld8(table, 2 * g + 1), ld8(counts, 2 * g)
        wanted = ld8(rows, 2 * g)
        target, target_stride = ld8(out, 2 * g), 4 * ld8(out, 2 * g + 1)
        for b in range(num_reqs):
            r = ld4(wanted, b)
            count = 0
            if r >= 0 and r < num_rows:
                count = imin(imax(ld4(num, r), 0), width)
                _copy4(target, base + r * stride, count)
            fill4(target, count, width, 0)
            target += target_stride


@njit(error_model="numpy")
def slot_mapping(n, num_tokens, table, rows, positions, out, attrs):  # type: ignore[no-untyped-def]
    """attrs: rows, width, block size, context-parallel size, rank, interleave, ring."""
    for g in range(n):
        num_rows, width = ld8(attrs, 7 * g), ld8(attrs, 7 * g + 1)
        block_size, size = ld8(attrs, 7 * g + 2), ld8(attrs, 7 * g + 3)
        rank, interleave, ring = ld8(attrs, 7 * g + 4), ld8(attrs, 7 * g + 5), ld8(attrs, 7 * g + 6)
        base, stride = ld8(table, 2 * g), ld8(table, 2 * g + 1)
        row_of, position_of, target = ld8(rows, 2 * g), ld8(positions, 2 * g), ld8(out, 2 * g)
        virtual = block_size * size
        for t in range(num_tokens):
            r, position, slot = ld4(row_of, t), ld8(position_of, t), -1
            if r >= 0 and r < num_rows and position >= 0:
                # 32-bit division is several times faster, and positions nearly always fit
                column = div32(position, virtual) if position < 2**31 else position // virtual
                offset = position - column * virtual
                if ring != 0:
                    column = column % width
                local = offset
                mine = True
                if size != 1:
                    mine = div32(offset, interleave) % size == rank
                    local = div32(offset, size * interleave) * interleave + offset % interleave
                if mine and column < width:
                    block = ld4(base, r * stride + column)
                    if block >= 0:
                        slot = block * block_size + local
            st8(target, t, slot)
