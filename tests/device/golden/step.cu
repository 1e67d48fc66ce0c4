extern "C" __global__ void __launch_bounds__(512, 1)
stepgraph_step(i64 ctx, int first, int last) {
    __shared__ i64 shared[5121];
    const i64 staging = ld8(ctx, 0);
    const i64 pad_U = ld8(ctx, 1);
    const i64 len_U = imin(imax(ld8(staging, 0), 0), pad_U);
    const i64 pad_N = ld8(ctx, 2);
    const i64 len_N = imin(imax(ld8(staging, 1), 0), pad_N);
    const i64 pad_B = ld8(ctx, 3);
    const i64 len_B = imin(imax(ld8(staging, 2), 0), pad_B);
    const i64 pad_T = ld8(ctx, 4);
    const i64 len_T = imin(imax(ld8(staging, 3), 0), pad_T);
    const i64 lane = threadIdx.x;
    const i64 width = blockDim.x;
    const i64 block = blockIdx.x;
    const i64 blocks = gridDim.x;
    const i64 thread = block * width + lane;
    const i64 threads = blocks * width;
    if (first <= 0 && 0 <= last) {
        // nest 1: loop 1 x [B]: query_start_loc, seq_lens, gt, reduce, last_scheduled_block
        {
            if (block == 0) {
                const i64 p1 = ld8(ctx, 5);
                const i64 a2 = ld8(p1, 0);
                i64 rv9 = 0;
                const i64 p4 = ld8(ctx, 6);
                const i64 a5 = ld8(p4, 0);
                if (lane == 0) {
                    st4(a5, 0, 0);
                }
                const i64 p6 = ld8(ctx, 7);
                const i64 a7 = ld8(p6, 0);
                const i64 p9 = ld8(ctx, 8);
                const i64 a10 = ld8(p9, 0);
                const i64 p11 = ld8(ctx, 9);
                const i64 a12 = ld8(p11, 0);
                i64 v24 = 2147483647;
                const i64 p13 = ld8(ctx, 10);
                const i64 a14 = ld8(p13, 0);
                const i64 p15 = ld8(ctx, 11);
                const i64 a16 = ld8(p15, 0);
                for (i64 base = 0; base < len_B; base += width) {
                    const i64 i = imin(base + lane, len_B - 1);
                    const i64 on = ((base + lane < len_B) ? i64(1) : i64(0));
                    const i64 x3 = ld4(a2, i);
                    const i64 sv9 = scan_sum(((on != 0) ? i64(x3) : i64(0)), shared);
                    const i64 tv9 = w32(rv9 + sv9);
                    const i64 v9 = tv9;
                    rv9 = w32(rv9 + scan_total(shared));
                    if (on != 0) {
                        st4(a5, i + 1, v9);
                    }
                    const i64 x8 = ld4(a7, i);
                    const i64 v11 = w32(x8 + x3);
                    if (on != 0) {
                        st4(a10, i, v11);
                    }
                    const i64 v22 = ((v11 > 1) ? i64(1) : i64(0));
                    if (on != 0) {
                        st1(a12, i, v22);
                    }
                    if (on != 0) {
                        v24 = imin(v24, v11);
                    }
                    const i64 v26 = w32(v11 - 1);
                    const i64 v27 = imax(v26, 0);
                    const i64 v28 = div32(v27, 128);
                    if (on != 0) {
                        st4(a16, i, v28);
                    }
                }
                v24 = reduce_min(v24, shared);
                if (lane == 0) {
                    st4(a14, 0, v24);
                }
            }
        }
        barrier();
    }
    if (first <= 1 && 1 <= last) {
        // nest 2: kernel 1 x [T]: token_to_request
        {
            const i64 p17 = ld8(ctx, 6);
            const i64 a18 = ld8(p17, 0);
            const i64 p19 = ld8(ctx, 12);
            const i64 a20 = ld8(p19, 0);
            segment_ids(a18, 0, imax((len_B +1) - 1, 0), a20, len_T, shared);
        }
        barrier();
    }
    if (first <= 2 && 2 <= last) {
        // nest 0: kernel 10 x [256,{64,64,64,64,64,64,..x10}]: custom_call
        {
            kernel_update_block_table(ld8(ctx, 13), len_U, len_N, ld8(ctx, 14), ld8(ctx, 15), ld8(ctx, 16), ld8(ctx, 17), ld8(ctx, 18), ld8(ctx, 14), ld8(ctx, 15), ld8(ctx, 19));
        }
        // nest 3: loop 1 x [T]: positions, slot_mapping
        {
            const i64 p21 = ld8(ctx, 6);
            const i64 a22 = ld8(p21, 0);
            const i64 p23 = ld8(ctx, 12);
            const i64 a24 = ld8(p23, 0);
            const i64 p26 = ld8(ctx, 7);
            const i64 a27 = ld8(p26, 0);
            const i64 p28 = ld8(ctx, 20);
            const i64 a29 = ld8(p28, 0);
            const i64 p30 = ld8(ctx, 21);
            const i64 a31 = ld8(p30, 0);
            const i64 p32 = ld8(ctx, 22);
            const i64 a33 = ld8(p32, 0);
            for (i64 k = thread; k < len_T; k += threads) {
                const i64 i = k;
                const i64 x25 = ld4(a24, i);
                const i64 v13 = (((0 <= x25 && x25 < (len_B +1))) ? i64(ld4(a22, x25)) : i64(0));
                const i64 v14 = w32(i - v13);
                const i64 v15 = (((0 <= x25 && x25 < len_B)) ? i64(ld4(a27, x25)) : i64(0));
                const i64 v18 = i64(u64(v15) + u64(v14));
                st8(a29, i, v18);
                const i64 v34 = (((0 <= x25 && x25 < len_B)) ? i64(ld4(a31, x25)) : i64(-1));
                st4(a33, i, v34);
            }
        }
        barrier();
    }
    if (first <= 3 && 3 <= last) {
        // nest 4: kernel 1 x [B]: compact
        {
            if (block == 0) {
                const i64 p34 = ld8(ctx, 9);
                const i64 a35 = ld8(p34, 0);
                const i64 p36 = ld8(ctx, 23);
                const i64 a37 = ld8(p36, 0);
                compact(a35, len_B, a37, -1, shared);
            }
        }
        // nest 5: loop 9 x [B,1]: state_indices
        {
            const i64 p38 = ld8(ctx, 24);
            const i64 p41 = ld8(ctx, 21);
            const i64 a42 = ld8(p41, 0);
            const i64 p44 = ld8(ctx, 11);
            const i64 a45 = ld8(p44, 0);
            const i64 y47 = 0;
            const i64 p49 = ld8(ctx, 25);
            for (i64 k = thread; k < ld8(ctx, 26) * len_B * 1; k += threads) {
                const i64 g = div32(k, len_B * 1);
                const i64 e = k - g * (len_B * 1);
                const i64 i = div32(e, 1);
                const i64 j = e - i * 1;
                const i64 a39 = ld8(p38, 2 * g);
                const i64 s40 = ld8(p38, 2 * g + 1);
                const i64 a50 = ld8(p49, 2 * g);
                const i64 s51 = ld8(p49, 2 * g + 1);
                const i64 x43 = ld4(a42, i);
                const i64 x46 = ld4(a45, i);
                const i64 y48 = w32(x46 + y47);
                const i64 v33 = (((0 <= x43 && x43 < 256) && (0 <= y48 && y48 < 64)) ? i64(ld4(a39, x43 * s40 + y48)) : i64(0));
                st4(a50, i * s51 + j, v33);
            }
        }
        // nest 6: kernel 1 x [T]: slot_mapping
        {
            kernel_slot_mapping(ld8(ctx, 27), len_T, ld8(ctx, 28), ld8(ctx, 22), ld8(ctx, 20), ld8(ctx, 29), ld8(ctx, 30));
        }
        // nest 7: kernel 1 x [B,512]: block_table
        {
            kernel_gather_block_table(ld8(ctx, 27), len_B, ld8(ctx, 28), ld8(ctx, 31), ld8(ctx, 21), ld8(ctx, 32), ld8(ctx, 33));
        }
        // pad of query_start_loc
        {
            const i64 p52 = ld8(ctx, 6);
            const i64 a53 = ld8(p52, 0);
            const i64 y54 = (len_B +1);
            const i64 y55 = w32(y54 + -1);
            const i64 y56 = (((0 <= y55 && y55 < (len_B +1))) ? i64(ld4(a53, y55)) : i64(0));
            for (i64 k = thread; k < ((pad_B +1) - (len_B +1)); k += threads) {
                const i64 i = k;
                st4(a53, (len_B +1) + i, y56);
            }
        }
        // pad of seq_lens
        {
            const i64 p57 = ld8(ctx, 8);
            const i64 a58 = ld8(p57, 0);
            for (i64 k = thread; k < (pad_B - len_B); k += threads) {
                const i64 i = k;
                st4(a58, len_B + i, 0);
            }
        }
        // pad of positions
        {
            const i64 p59 = ld8(ctx, 20);
            const i64 a60 = ld8(p59, 0);
            for (i64 k = thread; k < (pad_T - len_T); k += threads) {
                const i64 i = k;
                st8(a60, len_T + i, 0);
            }
        }
        // pad of found
        {
            const i64 p61 = ld8(ctx, 23);
            const i64 a62 = ld8(p61, 0);
            for (i64 k = thread; k < (pad_B - len_B); k += threads) {
                const i64 i = k;
                st4(a62, len_B + i, -1);
            }
        }
        // pad of state_indices
        {
            const i64 p63 = ld8(ctx, 25);
            for (i64 k = thread; k < ld8(ctx, 26) * (pad_B - len_B) * 1; k += threads) {
                const i64 g = div32(k, (pad_B - len_B) * 1);
                const i64 e = k - g * ((pad_B - len_B) * 1);
                const i64 i = div32(e, 1);
                const i64 j = e - i * 1;
                const i64 a64 = ld8(p63, 2 * g);
                const i64 s65 = ld8(p63, 2 * g + 1);
                st4(a64, (len_B + i) * s65 + j, 0);
            }
        }
        // pad of slot_mapping
        {
            const i64 p66 = ld8(ctx, 29);
            const i64 a67 = ld8(p66, 0);
            for (i64 k = thread; k < (pad_T - len_T); k += threads) {
                const i64 i = k;
                st8(a67, len_T + i, -1);
            }
        }
        // pad of block_table
        {
            const i64 p68 = ld8(ctx, 32);
            const i64 a69 = ld8(p68, 0);
            const i64 s70 = ld8(p68, 1);
            for (i64 k = thread; k < (pad_B - len_B) * 512; k += threads) {
                const i64 i = div32(k, 512);
                const i64 j = k - i * 512;
                st4(a69, (len_B + i) * s70 + j, 0);
            }
        }
        barrier();
    }
}
