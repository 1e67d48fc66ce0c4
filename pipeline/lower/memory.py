"""Loads, stores and integer arithmetic for code compiled by Numba, on plain addresses.

Everything is int64: an address is a number, a loaded element is sign-extended, an int32 result is
wrapped explicitly (`w32`). Importing this module imports Numba.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

I64 = types.int64


def _load(bits: int) -> Any:
    @intrinsic
    def load(typing_context, base, index):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            element = ir.IntType(bits)
            pointer = builder.inttoptr(args[0], element.as_pointer())
            value = builder.load(builder.gep(pointer, [args[1]]))
            return value if bits == 64 else builder.sext(value, ir.IntType(64))

        return I64(I64, I64), codegen

    return load


def _store(bits: int) -> Any:
    @intrinsic
    def store(typing_context, base, index, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            element = ir.IntType(bits)
            pointer = builder.inttoptr(args[0], element.as_pointer())
            narrow = args[2] if bits == 64 else builder.trunc(args[2], element)
            builder.store(narrow, builder.gep(pointer, [args[1]]))
            return context.get_dummy_value()

        return types.void(I64, I64, I64), codegen

    return store


# ld*(base, index), st*(base, index, value): element `index` of an int8/int32/int64 array at `base`
ld1, ld4, ld8 = _load(8), _load(32), _load(64)
st1, st4, st8 = _store(8), _store(32), _store(64)


@intrinsic
def w32(typing_context, value):  # type: ignore[no-untyped-def]
    """Wrap to int32 (two's complement), as int64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.sext(builder.trunc(args[0], ir.IntType(32)), ir.IntType(64))

    return I64(I64), codegen


def _division(bits: int, floor: bool) -> Any:
    """Signed division; the caller excludes b == 0 and min / -1, and for `floor` also b < 0."""

    @intrinsic
    def divide(typing_context, a, b):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            element = ir.IntType(bits)
            a, b = (x if bits == 64 else builder.trunc(x, element) for x in args)
            q = builder.sdiv(a, b)
            if floor:
                above = builder.icmp_signed(">", builder.mul(q, b), a)
                q = builder.add(q, builder.sext(above, element))
            return q if bits == 64 else builder.sext(q, ir.IntType(64))

        return I64(I64, I64), codegen

    return divide


# div*(a, b): floor division by a positive b
div32, div64, _cdiv64 = _division(32, True), _division(64, True), _division(64, False)


def _extremum(comparison: str) -> Any:
    @intrinsic
    def choose(typing_context, a, b):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.select(builder.icmp_signed(comparison, *args), *args)

        return I64(I64, I64), codegen

    return choose


# Numba's own min and max are compiled anew for each mix of literals and variables.
imin, imax = _extremum("<"), _extremum(">")


def _fill(bits: int) -> Any:
    @intrinsic
    def fill(typing_context, base, start, stop, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            element = ir.IntType(bits)
            pointer = builder.inttoptr(args[0], element.as_pointer())
            narrow = args[3] if bits == 64 else builder.trunc(args[3], element)
            with cgutils.for_range_slice(
                builder, args[1], args[2], ir.Constant(args[1].type, 1), args[1].type
            ) as (i, _):
                builder.store(narrow, builder.gep(pointer, [i]))
            return context.get_dummy_value()

        return types.void(I64, I64, I64, I64), codegen

    return fill


# fill*(base, start, stop, value): elements start to stop
fill1, fill4, fill8 = _fill(8), _fill(32), _fill(64)


@njit(error_model="numpy")
def floordiv(a, b):  # type: ignore[no-untyped-def]
    """Floor division, x // 0 = 0 and min // -1 wrapping (int64; int32 callers wrap the result)."""
    if b == 0:
        return 0
    if b == -1:
        return 0 - a
    q = _cdiv64(a, b)
    return q - 1 if (a - q * b != 0) and ((a < 0) != (b < 0)) else q


@njit(error_model="numpy")
def mod(a, b):  # type: ignore[no-untyped-def]
    """The remainder with the divisor's sign; x % 0 = 0."""
    if b == 0 or b == -1:
        return 0
    return a - floordiv(a, b) * b


@njit(error_model="numpy")
def segment_ids(offsets, wide, count, out, size):  # type: ignore[no-untyped-def]
    """The primitive segment_ids: `count` segments, `size` tokens."""
    position = 0
    for b in range(count):
        end = imin(ld8(offsets, b + 1) if wide else ld4(offsets, b + 1), size)
        while position < end:
            st4(out, position, b)
            position += 1
    fill4(out, position, size, count)


@njit(error_model="numpy")
def compact(mask, size, out, fill):  # type: ignore[no-untyped-def]
    """The primitive compact."""
    count = 0
    for i in range(size):
        if ld1(mask, i) != 0:
            st4(out, count, i)
            count += 1
    fill4(out, count, size, fill)
