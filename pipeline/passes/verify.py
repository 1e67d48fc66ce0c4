"""verify: every node obeys its primitive's rule, is defined before its use, and donated state is
not read after its update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepgraph.pipeline.errors import CompileError
from stepgraph.pipeline.ir import Aval, Consts, Graph, Node, Operand, Sizes, Use
from stepgraph.pipeline.primitives import PRIMITIVES


def verify(graph: Graph) -> Graph:
    """The same graph. Raises CompileError naming the stage and line of the first node that is
    wrong."""
    seen: set[Node] = set()
    for node in graph.nodes:
        for op in node.operands:
            _check_operand(node, op, seen)
        for m in range(node.n or 1):
            try:
                params = {k: _of(v, m) for k, v in node.params}
                avals = [_member_aval(op, m) for op in node.operands]
                want = PRIMITIVES[node.prim].rule(avals, params)
            except TypeError as err:
                raise CompileError(f"{node.prim}: {err}\n  {node.source}") from None
            have = tuple(_resolve(a, m) for a in node.avals)
            if tuple(_plain(w, m) for w in want) != tuple(replace(h, unit=None) for h in have):
                raise CompileError(
                    f"{node.prim} gives {want}, the graph says {have}\n  {node.source}"
                )
        seen.add(node)
    for out in graph.outputs:
        if out.use.node not in seen:
            raise CompileError(f"output {out.name!r} is not computed by the graph\n  {out.source}")
        if isinstance(out.pad, Use) and out.pad.aval.shape:
            raise CompileError(f"output {out.name!r}: the pad is not a scalar\n  {out.source}")
    _check_donation(graph)
    return graph


def _check_operand(node: Node, op: Operand, seen: set[Node]) -> None:
    if isinstance(op, Use):
        if op.node not in seen:
            raise CompileError(f"{node.prim} reads a value before it is computed\n  {node.source}")
        count = len(op.pick) if op.pick is not None else op.node.n
        if count is not None and count != (node.n or 1):
            raise CompileError(f"{node.prim}: {count} members read by {node.n}\n  {node.source}")
        if op.pick is not None and max(op.pick) >= (op.node.n or 1):
            raise CompileError(f"{node.prim} reads a member that is not there\n  {node.source}")
    elif isinstance(op, Consts) and len(op.values) != node.n:
        raise CompileError(f"{node.prim}: {len(op.values)} constants for {node.n} members")


def _member_aval(op: Operand, m: int) -> Aval:
    if not isinstance(op, Use):
        return Aval((), op.dtype)
    return _resolve(op.aval, op.member(m))


def _of(value: Any, m: int) -> Any:
    if isinstance(value, Aval):
        return _resolve(value, m)
    if isinstance(value, tuple):
        return tuple(_of(v, m) for v in value)
    return value.values[m] if isinstance(value, Sizes) else value


def _resolve(aval: Aval, m: int) -> Aval:
    return replace(aval, shape=tuple(_of(d, m) for d in aval.shape))


def _plain(aval: Aval, m: int) -> Aval:
    return replace(_resolve(aval, m), unit=None)


def _check_donation(graph: Graph) -> None:
    """A state input's only reader, besides its update chain, would see either value: refuse it."""
    donated = {
        (name, group)
        for out in graph.outputs
        if (name := out.updates) is not None
        for group in (out.groups or (None,))
    }
    readers: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for use in node.uses():
            readers.setdefault(use.node, []).append(node)
    for node in graph.inputs:
        groups = node.param("groups") or (None,)
        if not any((node.param("name"), g) in donated for g in groups):
            continue
        writers = [r for r in readers.get(node, []) if overwrites(r, node)]
        others = [r for r in readers.get(node, []) if r not in writers]
        if len(writers) > 1 or others:
            raise CompileError(
                f"state {node.param('name')!r} is updated in place, but its old value is also "
                f"read; read the updated value instead\n  {(others or writers[1:])[0].source}"
            )


def overwrites(node: Node, state: Node) -> bool:
    """Does `node` write its result over its operand `state`?"""
    if node.prim == "scatter":
        return isinstance(node.operands[0], Use) and node.operands[0].node is state
    if node.prim == "custom_call":
        places = dict(node.param("kernel").in_place).values()
        return any(
            isinstance(op, Use) and op.node is state
            for i, op in enumerate(node.operands)
            if i in places
        )
    return False
