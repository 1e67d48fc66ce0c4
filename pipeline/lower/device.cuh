// Loads, stores, integer arithmetic and block-wide scans for generated steps, on plain addresses.
// Every scalar is i64; an int32 result is wrapped explicitly (w32). Plain C++ that NVRTC compiles
// without headers.

typedef long long i64;
typedef unsigned long long u64;
typedef int i32;

#define DEVICE static __device__ __forceinline__

// element `index` of an int8/int32/int64 array at `base`
DEVICE i64 ld1(i64 base, i64 index) { return ((const signed char*)base)[index]; }
DEVICE i64 ld4(i64 base, i64 index) { return ((const i32*)base)[index]; }
DEVICE i64 ld8(i64 base, i64 index) { return ((const i64*)base)[index]; }
DEVICE void st1(i64 base, i64 index, i64 value) { ((signed char*)base)[index] = (signed char)value; }
DEVICE void st4(i64 base, i64 index, i64 value) { ((i32*)base)[index] = (i32)value; }
DEVICE void st8(i64 base, i64 index, i64 value) { ((i64*)base)[index] = value; }

DEVICE i64 imin(i64 a, i64 b) { return a < b ? a : b; }
DEVICE i64 imax(i64 a, i64 b) { return a > b ? a : b; }
DEVICE i64 w32(i64 a) { return (i32)a; }

// floor division by a positive b, in 32 and in 64 bits
DEVICE i64 div32(i64 a, i64 b) {
    const i32 q = (i32)a / (i32)b;
    return q - ((i32)a - q * (i32)b < 0);
}
DEVICE i64 div64(i64 a, i64 b) {
    const i64 q = a / b;
    return q - (a - q * b < 0);
}

// floor division and its remainder for any operands: x // 0 = x % 0 = 0, and min // -1 wraps
DEVICE i64 floordiv(i64 a, i64 b) {
    if (b == 0) return 0;
    if (b == -1) return (i64)(0 - (u64)a);
    const i64 q = a / b, r = a - q * b;
    return q - (r != 0 && (r < 0) != (b < 0));
}
DEVICE i64 mod(i64 a, i64 b) {
    if (b == 0 || b == -1) return 0;
    return a - floordiv(a, b) * b;
}

DEVICE void barrier() { __syncthreads(); }

// Inclusive running sum over a block, and its total afterwards. s: 2 * blockDim.x + 1 words.
DEVICE i64 scan_sum(i64 x, i64* s) {
    const int lane = threadIdx.x, width = blockDim.x;
    int from = 0;
    __syncthreads();  // the last user of s is done
    s[lane] = x;
    __syncthreads();
    for (int reach = 1; reach < width; reach *= 2) {
        const i64 before = lane >= reach ? s[from + lane - reach] : 0;
        const i64 sum = (i64)((u64)s[from + lane] + (u64)before);
        from = width - from;
        s[from + lane] = sum;
        __syncthreads();
    }
    const i64 mine = s[from + lane];
    if (lane == width - 1) s[2 * width] = mine;
    __syncthreads();
    return mine;
}
DEVICE i64 scan_total(const i64* s) { return s[2 * blockDim.x]; }

// Inclusive running maximum over a block; scan_total is then its last value.
DEVICE i64 scan_max(i64 x, i64* s) {
    const int lane = threadIdx.x, width = blockDim.x;
    int from = 0;
    __syncthreads();
    s[lane] = x;
    __syncthreads();
    for (int reach = 1; reach < width; reach *= 2) {
        const i64 greatest = imax(s[from + lane], s[from + (lane >= reach ? lane - reach : lane)]);
        from = width - from;
        s[from + lane] = greatest;
        __syncthreads();
    }
    const i64 mine = s[from + lane];
    if (lane == width - 1) s[2 * width] = mine;
    __syncthreads();
    return mine;
}

// One value of all threads of a block, known to each of them.
DEVICE i64 reduce_sum(i64 x, i64* s) {
    scan_sum(x, s);
    return scan_total(s);
}
DEVICE i64 reduce_max(i64 x, i64* s) {
    scan_max(x, s);
    return scan_total(s);
}
// -1 - x turns the order round without overflow
DEVICE i64 reduce_min(i64 x, i64* s) { return -1 - reduce_max(-1 - x, s); }

// The primitive segment_ids: token t belongs to the first segment whose end is greater than t.
// A block keeps the running maximum of the ends in shared memory and searches it; with more than
// 4096 segments each thread walks the ends instead. s: the scan's words, then 4096.
DEVICE void segment_ids(i64 offsets, int wide, i64 count, i64 out, i64 size, i64* s) {
    const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 threads = (i64)gridDim.x * blockDim.x;
    i64* ends = s + 1025;
    if (count <= 4096) {
        i64 before = 0;
        for (i64 base = 0; base < count; base += blockDim.x) {
            const i64 k = base + threadIdx.x;
            i64 end = 0;
            if (k < count) end = wide ? ld8(offsets, k + 1) : ld4(offsets, k + 1);
            end = imax(scan_max(end, s), before);
            if (k < count) ends[k] = end;
            before = imax(before, scan_total(s));
        }
        __syncthreads();
    }
    for (i64 t = thread; t < size; t += threads) {
        i64 first = 0;
        if (count <= 4096) {
            i64 stop = count;
            while (first < stop) {
                const i64 middle = (first + stop) / 2;
                if (ends[middle] <= t) first = middle + 1;
                else stop = middle;
            }
        } else {
            while (first < count && (wide ? ld8(offsets, first + 1) : ld4(offsets, first + 1)) <= t)
                first += 1;
        }
        st4(out, t, first);
    }
    __syncthreads();
}

// The primitive compact, by one block.
DEVICE void compact(i64 mask, i64 size, i64 out, i64 fill, i64* s) {
    i64 found = 0;
    for (i64 base = 0; base < size; base += blockDim.x) {
        const i64 k = base + threadIdx.x;
        const i64 taken = k < size && ld1(mask, k) != 0;
        const i64 place = found + scan_sum(taken, s) - 1;
        if (taken) st4(out, place, k);
        found += scan_total(s);
    }
    for (i64 k = found + threadIdx.x; k < size; k += blockDim.x) st4(out, k, fill);
}
