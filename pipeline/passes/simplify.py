"""simplify: constant folding and integer identities (x + 0, x * 1, x // 1, select of a constant,
broadcast of a broadcast, copy)."""

from __future__ import annotations

import numpy as np

from stepgraph.pipeline.ir import DTYPES, Graph, Lit, Node, Operand, Use
from stepgraph.pipeline.primitives import PRIMITIVES


def simplify(graph: Graph) -> Graph:
    """The graph with constants folded and identities applied."""
    return graph.rewrite(_rule)


def _rule(node: Node) -> Node | Operand | None:
    prim, ops = node.prim, node.operands
    if prim == "broadcast" and not node.aval.shape and isinstance(ops[0], Lit):
        return ops[0]
    if _foldable(node):
        args = [DTYPES[op.dtype].type(op.value) for op in ops if isinstance(op, Lit)]
        value = PRIMITIVES[prim].numpy(args, dict(node.params), [()])  # type: ignore[arg-type]
        return Lit(int(np.asarray(value)), node.aval.dtype)
    if prim in _IDENTITIES:
        side = _IDENTITIES[prim](ops)
        if side is not None and _same_value(ops[side], node):
            return ops[side]
    if prim == "select" and isinstance(ops[0], Lit):
        chosen = ops[1] if ops[0].value else ops[2]
        return chosen if _same_value(chosen, node) else None
    if prim == "cast" and _same_value(ops[0], node):
        return ops[0]
    if prim == "copy" or (prim == "broadcast" and _same_value(ops[0], node)):
        return ops[0] if isinstance(ops[0], Use) else None
    if prim == "broadcast" and isinstance(ops[0], Use) and ops[0].node.prim == "broadcast":
        inner, outer_axes = ops[0].node, node.param("axes")
        axes = tuple(outer_axes[a] for a in inner.param("axes"))
        return Node(
            "broadcast",
            inner.operands,
            (("axes", axes), ("shape", node.param("shape"))),
            node.avals,
            node.source,
        )
    return None


def _foldable(node: Node) -> bool:
    elementwise = PRIMITIVES[node.prim].loop == "elementwise"
    known = node.prim not in ("input", "iota", "broadcast", "extent", "gather", "custom_call")
    return (
        elementwise
        and known
        and bool(node.operands)
        and all(isinstance(op, Lit) for op in node.operands)
    )


def _is(op: Operand, value: int) -> bool:
    return isinstance(op, Lit) and op.value == value


_IDENTITIES = {
    "add": lambda ops: 0 if _is(ops[1], 0) else 1 if _is(ops[0], 0) else None,
    "sub": lambda ops: 0 if _is(ops[1], 0) else None,
    "mul": lambda ops: 0 if _is(ops[1], 1) else 1 if _is(ops[0], 1) else None,
    "floordiv": lambda ops: 0 if _is(ops[1], 1) else None,
}


def _same_value(op: Operand, node: Node) -> bool:
    """Can `op` stand for the node's result (same shape and dtype)?"""
    if isinstance(op, Use):
        return (op.aval.shape, op.aval.dtype) == (node.aval.shape, node.aval.dtype)
    return not node.aval.shape and op.dtype == node.aval.dtype
