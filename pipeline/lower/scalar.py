"""The scalar-expression printer: one elementwise primitive over named scalars, as text.

All scalars are int64 and an int32 result is wrapped explicitly, on every target. What the targets'
languages spell differently is a `Dialect`.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.pipeline.ir import Consts, Lit, Node, Operand

WIDTH = {"bool": 1, "int32": 4, "int64": 8}

_BINARY = {"add": "+", "sub": "-", "mul": "*"}
_BITS = {"and": "&", "or": "|", "xor": "^"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


class Dialect:
    """Python, as Numba compiles it: the spelling that the others differ from."""

    def literal(self, value: int) -> str:
        return str(value)

    def choose(self, condition: str, a: str, b: str) -> str:
        return f"{a} if {condition} else {b}"

    def inside(self, index: str, size: str) -> str:
        return f"0 <= {index} < {size}"

    def both(self, conditions: Sequence[str]) -> str:
        return " and ".join(conditions)

    def wide(self, op: str, a: str, b: str) -> str:
        """int64 arithmetic that wraps around."""
        return f"{a} {op} {b}"

    def load(self, width: int, address: str, place: str) -> str:
        return f"ld{width}({address}, {place})"

    def guarded_load(
        self, width: int, address: str, place: str, guards: Sequence[str], outside: str
    ) -> str:
        """An element that is read only if all of `guards` hold, else `outside`."""
        return self.choose(self.both(guards), self.load(width, address, place), outside)


def expression(node: Node, args: Sequence[str], d: Dialect) -> str:
    """One elementwise primitive over scalars named `args`."""
    prim, dtype = node.prim, node.aval.dtype
    if prim in _BINARY or prim == "neg":
        a, b = args if prim in _BINARY else ("0", args[0])
        op = _BINARY.get(prim, "-")
        return f"w32({a} {op} {b})" if dtype == "int32" else d.wide(op, a, b)
    if prim in _BITS:
        return f"{args[0]} {_BITS[prim]} {args[1]}"
    if prim == "not":
        return f"{args[0]} ^ {1 if dtype == 'bool' else -1}"
    if prim in _COMPARE:
        return d.choose(f"{args[0]} {_COMPARE[prim]} {args[1]}", "1", "0")
    if prim in ("min", "max"):
        return f"i{prim}({args[0]}, {args[1]})"
    if prim == "select":
        return d.choose(f"{args[0]} != 0", args[1], args[2])
    if prim == "cast":
        if dtype == "bool":
            return d.choose(f"{args[0]} != 0", "1", "0")
        return wrap(dtype, args[0])
    if prim in ("floordiv", "mod"):
        if _positive(node.operands[1]):
            name = "div32" if dtype == "int32" else "div64"
            quotient = f"{name}({args[0]}, {args[1]})"
            return quotient if prim == "floordiv" else f"{args[0]} - {quotient} * {args[1]}"
        return wrap(dtype, f"{prim}({args[0]}, {args[1]})")
    if prim == "copy":
        return args[0]
    raise NotImplementedError(f"there is no rule that prints {prim!r}")


def wrap(dtype: str, text: str) -> str:
    return f"w32({text})" if dtype == "int32" else text


def _positive(op: Operand) -> bool:
    if isinstance(op, Lit):
        return op.value > 0
    return isinstance(op, Consts) and min(op.values) > 0
