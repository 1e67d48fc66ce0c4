"""The scalar-expression printer: one elementwise primitive over named scalars, as text.

All scalars are int64; an int32 result is wrapped explicitly.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.pipeline.ir import Consts, Lit, Node, Operand

WIDTH = {"bool": 1, "int32": 4, "int64": 8}

_BINARY = {"add": "+", "sub": "-", "mul": "*"}
_BITS = {"and": "&", "or": "|", "xor": "^"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def expression(node: Node, args: Sequence[str]) -> str:
    """One elementwise primitive over scalars named `args`."""
    prim, dtype = node.prim, node.aval.dtype
    if prim in _BINARY:
        return wrap(dtype, f"{args[0]} {_BINARY[prim]} {args[1]}")
    if prim == "neg":
        return wrap(dtype, f"0 - {args[0]}")
    if prim in _BITS:
        return f"{args[0]} {_BITS[prim]} {args[1]}"
    if prim == "not":
        return f"{args[0]} ^ {1 if dtype == 'bool' else -1}"
    if prim in _COMPARE:
        return f"1 if {args[0]} {_COMPARE[prim]} {args[1]} else 0"
    if prim in ("min", "max"):
        return f"i{prim}({args[0]}, {args[1]})"
    if prim == "select":
        return f"{args[1]} if {args[0]} != 0 else {args[2]}"
    if prim == "cast":
        if dtype == "bool":
            return f"1 if {args[0]} != 0 else 0"
        return wrap(dtype, args[0])
    if prim in ("floordiv", "mod"):
        if _positive(node.operands[1]):
            name = "div32" if dtype == "int32" else "div64"
            quotient = f"{name}({args[0]}, {args[1]})"
            return quotient if prim == "floordiv" else f"{args[0]} - {quotient} * {args[1]}"
        return wrap(dtype, f"{prim}({args[0]}, {args[1]})")
    if prim == "copy":
        return args[0]
    raise NotImplementedError(f"the CPU target has no rule for {prim!r}")


def wrap(dtype: str, text: str) -> str:
    return f"w32({text})" if dtype == "int32" else text


def _positive(op: Operand) -> bool:
    if isinstance(op, Lit):
        return op.value > 0
    return isinstance(op, Consts) and min(op.values) > 0
