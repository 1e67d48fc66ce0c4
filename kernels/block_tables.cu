// The block-table kernels in CUDA C++ (device.cuh comes before this file). They are called by all
// threads of a launch; arguments as described in stepgraph.pipeline.custom_call: n groups, the
// extents, for each array the address of a table of (address, row stride) per group, and the
// groups' static integers.

// One block per group; its threads share the columns. attrs: group, rows, width.
DEVICE void kernel_update_block_table(i64 n, i64 num_ops, i64 num_ids, i64 table, i64 counts,
                                      i64 ops, i64 offsets, i64 ids, i64 out, i64 out_counts,
                                      i64 attrs) {
    const i64 lane = threadIdx.x, lanes = blockDim.x;
    const i64 list = ld8(ops, 0), starts = ld8(offsets, 0), pool = ld8(ids, 0);
    for (i64 g = blockIdx.x; g < n; g += gridDim.x) {
        const i64 group = ld8(attrs, 3 * g), rows = ld8(attrs, 3 * g + 1);
        const i64 width = ld8(attrs, 3 * g + 2);
        const i64 base = ld8(table, 2 * g), stride = 4 * ld8(table, 2 * g + 1);
        const i64 num = ld8(counts, 2 * g);
        const i64 first = imin(imax(ld4(starts, group), 0), num_ops);
        const i64 last = imin(ld4(starts, group + 1), num_ops);
        for (i64 k = first; k < last; k++) {
            const i64 kind = ld4(list, 5 * k), r = ld4(list, 5 * k + 1);
            const i64 other = ld4(list, 5 * k + 2);
            const i64 start = ld4(list, 5 * k + 3), length = ld4(list, 5 * k + 4);
            const bool put = kind == 0 || kind == 1, pair = kind == 2 || kind == 3;
            const bool possible =
                r >= 0 && r < rows &&
                (put ? start >= 0 && length >= 0 && start + length <= num_ids
                     : pair ? other >= 0 && other < rows && other != r : kind == 4);
            const i64 count = possible ? ld4(num, r) : 0;
            const i64 other_count = possible && pair ? ld4(num, other) : 0;
            const i64 row = base + r * stride, target = base + other * stride;
            __syncthreads();  // the counts are read, the previous update is written
            if (!possible) continue;
            if (pair) {
                for (i64 c = lane; c < width; c += lanes) {
                    const i64 mine = ld4(row, c), theirs = kind == 3 ? ld4(target, c) : 0;
                    st4(target, c, mine);
                    st4(row, c, theirs);
                }
                if (lane == 0) {
                    st4(num, other, count);
                    st4(num, r, kind == 3 ? other_count : 0);
                }
            } else {
                const i64 at = kind == 0 ? imin(imax(count, 0), width) : 0;
                const i64 size = put ? length : 0;
                if (at + size <= width) {
                    for (i64 c = at + lane; c < width; c += lanes)
                        st4(row, c, c - at < size ? imax(ld4(pool, start + c - at), 0) : 0);
                    if (lane == 0) st4(num, r, at + size);
                }
            }
            __syncthreads();
        }
    }
}

// 32 threads per row. attrs: rows, width.
DEVICE void kernel_gather_block_table(i64 n, i64 num_reqs, i64 table, i64 counts, i64 rows,
                                      i64 out, i64 attrs) {
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 lane = thread % 32, teams = (i64)gridDim.x * blockDim.x / 32;
    for (i64 k = thread / 32; k < n * num_reqs; k += teams) {
        const i64 g = div32(k, num_reqs), b = k - g * num_reqs;
        const i64 num_rows = ld8(attrs, 2 * g), width = ld8(attrs, 2 * g + 1);
        const i64 r = ld4(ld8(rows, 2 * g), b);
        const bool known = r >= 0 && r < num_rows;
        const i64 count = known ? imin(imax(ld4(ld8(counts, 2 * g), r), 0), width) : 0;
        const i64 source = ld8(table, 2 * g) + (known ? r : 0) * 4 * ld8(table, 2 * g + 1);
        const i64 target = ld8(out, 2 * g) + b * 4 * ld8(out, 2 * g + 1);
        for (i64 c = lane; c < width; c += 32) st4(target, c, c < count ? ld4(source, c) : 0);
    }
}

// attrs: rows, width, block size, context-parallel size, rank, interleave, ring.
DEVICE void kernel_slot_mapping(i64 n, i64 num_tokens, i64 table, i64 rows, i64 positions, i64 out,
                                i64 attrs) {
    const i64 threads = (i64)gridDim.x * blockDim.x;
    for (i64 k = (i64)blockIdx.x * blockDim.x + threadIdx.x; k < n * num_tokens; k += threads) {
        const i64 g = div32(k, num_tokens), t = k - g * num_tokens, own = attrs + 56 * g;
        const i64 num_rows = ld8(own, 0), width = ld8(own, 1), block_size = ld8(own, 2);
        const i64 size = ld8(own, 3), rank = ld8(own, 4), interleave = ld8(own, 5);
        const i64 virtual_size = block_size * size;
        const i64 r = ld4(ld8(rows, 2 * g), t), position = ld8(ld8(positions, 2 * g), t);
        i64 slot = -1;
        if (r >= 0 && r < num_rows && position >= 0) {
            // 32-bit division is several times faster, and positions nearly always fit
            i64 column = position <= 2147483647 ? div32(position, virtual_size)
                                                : div64(position, virtual_size);
            const i64 offset = position - column * virtual_size;
            if (ld8(own, 6) != 0) column -= div64(column, width) * width;
            i64 local = offset;
            bool mine = true;
            if (size != 1) {
                const i64 turn = div32(offset, interleave), round = div32(turn, size);
                mine = turn - round * size == rank;
                local = round * interleave + offset - turn * interleave;
            }
            if (mine && column < width) {
                const i64 block = ld4(ld8(table, 2 * g), r * ld8(table, 2 * g + 1) + column);
                if (block >= 0) slot = block * block_size + local;
            }
        }
        st8(ld8(out, 2 * g), t, slot);
    }
}
