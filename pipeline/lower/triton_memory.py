"""What generated steps call on Triton: loads and stores on plain addresses, integer arithmetic,
scans of a tile. Values are int64, scalars or tiles. Importing this imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(128)
SEGMENT_TILE = tl.constexpr(16)
jit = triton.jit


@jit
def i64(x):  # type: ignore[no-untyped-def]
    return tl.cast(x, tl.int64)


@jit
def holds(mask, at):  # type: ignore[no-untyped-def]
    """A mask as int1 of the shape of the addresses `at`, as loads and stores want it. (Triton 3.9's
    interpreter leaves wider integers when it combines or broadcasts comparisons.)"""
    wide, _ = tl.broadcast(i64(mask), at)
    return wide != 0


@jit
def lanes():  # type: ignore[no-untyped-def]
    return tl.arange(0, TILE).to(tl.int64)


@jit
def tile(x):  # type: ignore[no-untyped-def]
    return tl.full((TILE,), x, tl.int64)


# ld*(base, index), st*(base, index, value, mask): elements of an int8/int32/int64 array at `base`
@jit
def ld1(base, index):  # type: ignore[no-untyped-def]
    return tl.load((base + index).to(tl.pointer_type(tl.int8))).to(tl.int64)


@jit
def ld4(base, index):  # type: ignore[no-untyped-def]
    return tl.load((base + 4 * i64(index)).to(tl.pointer_type(tl.int32))).to(tl.int64)


@jit
def ld8(base, index):  # type: ignore[no-untyped-def]
    return tl.load((base + 8 * i64(index)).to(tl.pointer_type(tl.int64)))


@jit
def ldm1(base, index, mask, outside):  # type: ignore[no-untyped-def]
    """An element, read only where `mask` holds; `outside` elsewhere."""
    at = (base + choose(mask, index, 0)).to(tl.pointer_type(tl.int8))
    return choose(mask, tl.load(at, mask=holds(mask, at), other=0), outside)


@jit
def ldm4(base, index, mask, outside):  # type: ignore[no-untyped-def]
    at = (base + 4 * choose(mask, index, 0)).to(tl.pointer_type(tl.int32))
    return choose(mask, tl.load(at, mask=holds(mask, at), other=0), outside)


@jit
def ldm8(base, index, mask, outside):  # type: ignore[no-untyped-def]
    at = (base + 8 * choose(mask, index, 0)).to(tl.pointer_type(tl.int64))
    return choose(mask, tl.load(at, mask=holds(mask, at), other=0), outside)


@jit
def st1(base, index, value, mask):  # type: ignore[no-untyped-def]
    at = base + choose(mask, index, 0)
    tl.store(at.to(tl.pointer_type(tl.int8)), i64(value).to(tl.int8), mask=holds(mask, at))


@jit
def st4(base, index, value, mask):  # type: ignore[no-untyped-def]
    at = base + 4 * choose(mask, index, 0)
    tl.store(at.to(tl.pointer_type(tl.int32)), i64(value).to(tl.int32), mask=holds(mask, at))


@jit
def st8(base, index, value, mask):  # type: ignore[no-untyped-def]
    at = base + 8 * choose(mask, index, 0)
    tl.store(at.to(tl.pointer_type(tl.int64)), i64(value), mask=holds(mask, at))


@jit
def choose(condition, a, b):  # type: ignore[no-untyped-def]
    return tl.where(condition, i64(a), i64(b))


@jit
def imin(a, b):  # type: ignore[no-untyped-def]
    return choose(i64(a) < i64(b), a, b)


@jit
def imax(a, b):  # type: ignore[no-untyped-def]
    return choose(i64(a) > i64(b), a, b)


@jit
def w32(a):  # type: ignore[no-untyped-def]
    return i64(a).to(tl.int32).to(tl.int64)


@jit
def div32(a, b):  # type: ignore[no-untyped-def]
    """Floor division by a positive b, both within 32 bits. (Triton's own truncates when compiled;
    either is corrected by the remainder.)"""
    x, y = i64(a).to(tl.int32), i64(b).to(tl.int32)
    q = x // y
    return i64(q) - i64(x - q * y < 0)


@jit
def div64(a, b):  # type: ignore[no-untyped-def]
    x, y = i64(a), i64(b)
    q = x // y
    return q - i64(x - q * y < 0)


@jit
def floordiv(a, b):  # type: ignore[no-untyped-def]
    """Floor division: x // 0 = 0, and min // -1 wraps."""
    x, y = i64(a), i64(b)
    odd = (y == 0) | (y == -1)
    safe = choose(odd, 1, y)
    q = x // safe
    r = x - q * safe
    q = q - i64((r != 0) & ((r < 0) != (safe < 0)))
    return choose(odd, choose(y == 0, 0, 0 - x), q)


@jit
def mod(a, b):  # type: ignore[no-untyped-def]
    x, y = i64(a), i64(b)
    odd = (y == 0) | (y == -1)
    safe = choose(odd, 1, y)
    return choose(odd, 0, x - floordiv(x, safe) * safe)


@jit
def _greater(a, b):  # type: ignore[no-untyped-def]
    return tl.where(a > b, a, b)


@jit
def scan_sum(x):  # type: ignore[no-untyped-def]
    return tl.cumsum(x, 0)


@jit
def reduce_sum(x):  # type: ignore[no-untyped-def]
    return tl.sum(x, 0)


@jit
def reduce_max(x):  # type: ignore[no-untyped-def]
    return tl.max(x, 0)


@jit
def reduce_min(x):  # type: ignore[no-untyped-def]
    return tl.min(x, 0)


@jit
def segment_ids(offsets, count, out, size, block, blocks, load: tl.constexpr):  # type: ignore[no-untyped-def]
    """Token t belongs to the first segment whose end is greater than t: as many as the running
    maximum of the ends leaves at or below t. `load`: ld4 or ld8."""
    for base in range(block * TILE, size, blocks * TILE):
        t = base + lanes()
        before = i64(0)
        found = tl.zeros((TILE,), tl.int32)
        for start in range(0, count, SEGMENT_TILE):
            k = start + tl.arange(0, SEGMENT_TILE).to(tl.int64)
            ends = choose(k < count, load(offsets, imin(k, count - 1) + 1), 0)
            ends = imax(tl.associative_scan(ends, 0, _greater), before)
            # In 32 bits: it is the largest tile here.
            limit = imin(choose(k < count, ends, size), size).to(tl.int32)
            passed = limit[None, :] <= t.to(tl.int32)[:, None]
            found += tl.sum(passed.to(tl.int32), 1)
            before = imax(before, tl.max(ends, 0))
        st4(out, t, found, t < size)


@jit
def compact(mask, size, out, fill):  # type: ignore[no-untyped-def]
    """The primitive compact, by one program."""
    found = i64(0)
    for base in range(0, size, TILE):
        k = base + lanes()
        taken = choose(k < size, ld1(mask, imin(k, size - 1)), 0)
        place = found + tl.cumsum(taken, 0) - 1
        st4(out, place, k, taken != 0)
        found += tl.sum(taken, 0)
    for base in range(found, size, TILE):
        k = base + lanes()
        st4(out, k, fill, k < size)
