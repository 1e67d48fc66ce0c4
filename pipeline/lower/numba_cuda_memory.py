"""What generated steps call on Numba-CUDA: the functions of device.cuh, in Python. Importing this
imports numba-cuda. Under its simulator plain Python does the same on host addresses."""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir
from numba import cuda, types

from stepgraph.pipeline.lower.simt import SCAN_WORDS, SEGMENTS

int64 = types.int64
SIMULATED = bool(cuda.config.ENABLE_CUDASIM)
_BITS = {1: (8, ctypes.c_int8), 4: (32, ctypes.c_int32), 8: (64, ctypes.c_int64)}
device: Any = cuda.jit(device=True)


def _load(width: int) -> Any:
    bits, ctype = _BITS[width]
    if SIMULATED:
        return lambda base, index: ctype.from_address(base + width * index).value

    from numba.cuda.extending import intrinsic

    @intrinsic
    def load(typing_context, base, index):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            element = ir.IntType(bits)
            pointer = builder.inttoptr(args[0], element.as_pointer())
            value = builder.load(builder.gep(pointer, [args[1]]))
            return value if bits == 64 else builder.sext(value, ir.IntType(64))

        return int64(int64, int64), codegen

    return load


def _store(width: int) -> Any:
    bits, ctype = _BITS[width]
    if SIMULATED:

        def put(base: int, index: int, value: int) -> None:
            ctype.from_address(base + width * index).value = value

        return put

    from numba.cuda.extending import intrinsic

    @intrinsic
    def store(typing_context, base, index, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            element = ir.IntType(bits)
            pointer = builder.inttoptr(args[0], element.as_pointer())
            narrow = args[2] if bits == 64 else builder.trunc(args[2], element)
            builder.store(narrow, builder.gep(pointer, [args[1]]))
            return context.get_dummy_value()

        return types.void(int64, int64, int64), codegen

    return store


# ld*(base, index), st*(base, index, value): element `index` of an int8/int32/int64 array at `base`
ld1, ld4, ld8 = _load(1), _load(4), _load(8)
st1, st4, st8 = _store(1), _store(4), _store(8)

if SIMULATED:

    def i64(x: Any) -> int:
        return int(x)

    def w32(a: int) -> int:
        return ctypes.c_int32(a).value

    def w64(a: int) -> int:
        return ctypes.c_int64(a).value

    def quotient(a: int, b: int) -> int:
        """a / b towards zero."""
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

else:

    @device
    def i64(x):  # type: ignore[no-untyped-def]
        return int64(x)

    @device
    def w32(a):  # type: ignore[no-untyped-def]
        return int64(types.int32(a))

    @device
    def w64(a):  # type: ignore[no-untyped-def]
        return a

    def _quotient() -> Any:
        from numba.cuda.extending import intrinsic

        @intrinsic
        def divide(typing_context, a, b):  # type: ignore[no-untyped-def]
            def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
                return builder.sdiv(*args)

            return int64(int64, int64), codegen

        return divide

    quotient = _quotient()


@device
def add64(a, b):  # type: ignore[no-untyped-def]
    return w64(a + b)


@device
def sub64(a, b):  # type: ignore[no-untyped-def]
    return w64(a - b)


@device
def mul64(a, b):  # type: ignore[no-untyped-def]
    return w64(a * b)


@device
def imin(a, b):  # type: ignore[no-untyped-def]
    return a if a < b else b


@device
def imax(a, b):  # type: ignore[no-untyped-def]
    return a if a > b else b


@device
def div64(a, b):  # type: ignore[no-untyped-def]
    """Floor division by a positive b."""
    q = quotient(a, b)
    return q - 1 if a - q * b < 0 else q


div32 = div64


@device
def floordiv(a, b):  # type: ignore[no-untyped-def]
    """Floor division: x // 0 = 0, and min // -1 wraps."""
    if b == 0:
        return i64(0)
    if b == -1:
        return w64(0 - a)
    q = quotient(a, b)
    r = a - q * b
    return q - 1 if r != 0 and (r < 0) != (b < 0) else q


@device
def mod(a, b):  # type: ignore[no-untyped-def]
    if b == 0 or b == -1:
        return i64(0)
    return a - floordiv(a, b) * b


@device
def barrier():  # type: ignore[no-untyped-def]
    cuda.syncthreads()


@device
def scan_sum(x, s):  # type: ignore[no-untyped-def]
    """Inclusive running sum over a block; scan_total then. s: 2 * blockDim.x + 1 words."""
    lane, width = i64(cuda.threadIdx.x), i64(cuda.blockDim.x)
    start, reach = i64(0), i64(1)
    cuda.syncthreads()
    s[lane] = x
    cuda.syncthreads()
    while reach < width:
        total = i64(s[start + lane])
        if lane >= reach:
            total = w64(total + i64(s[start + lane - reach]))
        start = width - start
        s[start + lane] = total
        reach *= 2
        cuda.syncthreads()
    mine = i64(s[start + lane])
    if lane == width - 1:
        s[2 * width] = mine
    cuda.syncthreads()
    return mine


@device
def scan_total(s):  # type: ignore[no-untyped-def]
    return i64(s[2 * i64(cuda.blockDim.x)])


@device
def scan_max(x, s):  # type: ignore[no-untyped-def]
    """Inclusive running maximum over a block; scan_total is then its last value."""
    lane, width = i64(cuda.threadIdx.x), i64(cuda.blockDim.x)
    start, reach = i64(0), i64(1)
    cuda.syncthreads()
    s[lane] = x
    cuda.syncthreads()
    while reach < width:
        greatest = i64(s[start + lane])
        if lane >= reach:
            greatest = imax(greatest, i64(s[start + lane - reach]))
        start = width - start
        s[start + lane] = greatest
        reach *= 2
        cuda.syncthreads()
    mine = i64(s[start + lane])
    if lane == width - 1:
        s[2 * width] = mine
    cuda.syncthreads()
    return mine


@device
def reduce_sum(x, s):  # type: ignore[no-untyped-def]
    scan_sum(x, s)
    return scan_total(s)


@device
def reduce_max(x, s):  # type: ignore[no-untyped-def]
    scan_max(x, s)
    return scan_total(s)


@device
def reduce_min(x, s):  # type: ignore[no-untyped-def]
    return -1 - reduce_max(-1 - x, s)


@device
def segment_ids(offsets, wide, count, out, size, s):  # type: ignore[no-untyped-def]
    """As in device.cuh: a search in the running maximum of the ends, kept in shared memory."""
    lane, width = i64(cuda.threadIdx.x), i64(cuda.blockDim.x)
    thread = i64(cuda.blockIdx.x) * width + lane
    threads = i64(cuda.gridDim.x) * width
    if count <= SEGMENTS:
        before = i64(0)
        for base in range(0, count, width):
            k = base + lane
            end = i64(0)
            if k < count:
                end = ld8(offsets, k + 1) if wide else ld4(offsets, k + 1)
            end = imax(scan_max(end, s), before)
            if k < count:
                s[SCAN_WORDS + k] = end
            before = imax(before, scan_total(s))
        cuda.syncthreads()
    for t in range(thread, size, threads):
        first = i64(0)
        if count <= SEGMENTS:
            stop = i64(count)
            while first < stop:
                middle = (first + stop) >> 1
                if s[SCAN_WORDS + middle] <= t:
                    first = middle + 1
                else:
                    stop = middle
        else:
            while (
                first < count
                and (ld8(offsets, first + 1) if wide else ld4(offsets, first + 1)) <= t
            ):
                first += 1
        st4(out, t, first)
    cuda.syncthreads()


@device
def compact(mask, size, out, fill, s):  # type: ignore[no-untyped-def]
    """The primitive compact, by one block."""
    lane, width = i64(cuda.threadIdx.x), i64(cuda.blockDim.x)
    found = i64(0)
    for base in range(0, size, width):
        k = base + lane
        taken = i64(0)
        if k < size and ld1(mask, k) != 0:
            taken = i64(1)
        place = found + scan_sum(taken, s) - 1
        if taken != 0:
            st4(out, place, k)
        found += scan_total(s)
    for k in range(found + lane, size, width):
        st4(out, k, fill)
