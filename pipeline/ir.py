"""The graph: a list of nodes in topological order, its inputs and its outputs.

A node applies one primitive to operands. After tracing, every KV-cache group has nodes of its own;
after group batching, a node may stand for the same computation in `n` groups: it then has `n`
*members*, and an operand that differs between them says so (`Consts`: a constant per member;
`Use.pick`: which member of the producer each member reads).

    graph(B, T):
      %0: int32[B]         = input "num_computed_tokens" host
      %1: int32[B]         = input "num_scheduled_tokens" host
      %2: int32[B]         = add %0 %1                        # seq_lens
      out "seq_lens" = %2 pad 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

DTYPES = {"bool": np.dtype(np.bool_), "int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}


@dataclass(frozen=True)
class Dim:
    """A symbolic extent: `name` plus a constant, e.g. B + 1."""

    name: str
    offset: int = 0

    def __add__(self, other: int) -> Dim:
        return Dim(self.name, self.offset + other)

    def __sub__(self, other: int) -> Dim:
        return self + (-other)

    def __str__(self) -> str:
        return self.name if self.offset == 0 else f"{self.name}{self.offset:+d}"


@dataclass(frozen=True)
class Sizes:
    """A static extent that differs between the members of a batched node."""

    values: tuple[int, ...]

    def __str__(self) -> str:
        return "{" + _short(self.values) + "}"


Extent: TypeAlias = "int | Dim | Sizes"


def extent_of(dim: Extent, env: Mapping[str, int], member: int = 0) -> int:
    """The number that `dim` stands for when the symbols have the extents in `env`."""
    if isinstance(dim, int):
        return dim
    if isinstance(dim, Sizes):
        return dim.values[member]
    return env[dim.name] + dim.offset


@dataclass(frozen=True)
class Aval:
    """Abstract value: shape and dtype; `unit` names what an id counts ("row", "block", ...)."""

    shape: tuple[Extent, ...]
    dtype: str
    unit: str | None = None

    def of_member(self, m: int) -> Aval:
        """The abstract value of one member of a batched node."""
        shape = tuple(d.values[m] if isinstance(d, Sizes) else d for d in self.shape)
        return replace(self, shape=shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Source:
    """Where a node was traced: stage name and file:line, and where the stage was called."""

    stage: str = ""
    line: str = ""
    caller: str = ""

    def __str__(self) -> str:
        where = f"in stage {self.stage!r}" if self.stage else "in the step function"
        text = f"{where} at {self.line}" if self.line else where
        return f"{text} (called from {self.caller})" if self.caller else text


@dataclass(frozen=True)
class Lit:
    """A scalar constant operand."""

    value: int
    dtype: str

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Consts:
    """A scalar constant operand, one per member of a batched node."""

    values: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return "{" + _short(self.values) + "}"


@dataclass(frozen=True)
class Use:
    """Result `result` of `node` as an operand.

    For a consumer with members: `pick[m]` is the producer's member that member m reads; None means
    the same member (batched producer) or the one shared value (unbatched producer).
    """

    node: Node
    result: int = 0
    pick: tuple[int, ...] | None = None

    @property
    def aval(self) -> Aval:
        return self.node.avals[self.result]

    def member(self, m: int) -> int:
        """The producer's member that the consumer's member `m` reads."""
        if self.pick is not None:
            return self.pick[m]
        return m if self.node.n is not None else 0


Operand: TypeAlias = "Use | Lit | Consts"


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """One application of a primitive. Compared by identity; `key()` is the structural identity."""

    prim: str
    operands: tuple[Operand, ...]
    params: tuple[tuple[str, Any], ...]
    avals: tuple[Aval, ...]
    source: Source = Source()
    n: int | None = None

    @property
    def aval(self) -> Aval:
        return self.avals[0]

    def param(self, name: str) -> Any:
        return dict(self.params)[name]

    def uses(self) -> Iterable[Use]:
        return (op for op in self.operands if isinstance(op, Use))

    def __repr__(self) -> str:
        return f"<{self.prim} {', '.join(map(str, self.avals))}>"

    def key(self) -> tuple[Any, ...]:
        return (self.prim, self.operands, self.params, self.avals, self.n)


@dataclass(frozen=True)
class Output:
    """A persistent output: `use` over its actual extent, `pad` beyond it.

    groups: the groups whose field this is, one per member; None for a field shared by all groups.
    host: wanted on the host (small counts that backends read as Python ints).
    updates: name of the state input this value is written back to, in place (donation).
    """

    name: str
    groups: tuple[str, ...] | None
    use: Use
    pad: Operand
    source: Source = Source()
    host: bool = False
    updates: str | None = None

    def label(self, member: int = 0) -> str:
        return self.name if self.groups is None else f"{self.name}[{self.groups[member]}]"


@dataclass
class Graph:
    """Nodes in topological order (inputs included), the outputs, and the symbolic dims in order."""

    dims: tuple[str, ...]
    nodes: list[Node]
    outputs: list[Output]
    groups: tuple[Any, ...] = ()

    @property
    def inputs(self) -> list[Node]:
        return [node for node in self.nodes if node.prim == "input"]

    def __str__(self) -> str:
        return print_graph(self)

    def __repr__(self) -> str:
        return f"<Graph: {len(self.nodes)} nodes, {len(self.outputs)} outputs>"

    def rewrite(self, rule: Callable[[Node], Operand | Node | None]) -> Graph:
        """A new graph in which each node was replaced by what `rule` gives for it.

        `rule` sees a node whose operands are already rewritten, and returns a node (perhaps the
        same), or an operand that replaces the node's only result everywhere.
        """
        done: dict[Node, Node | Operand] = {}
        nodes: dict[Node, None] = {}

        def operand(op: Operand) -> Operand:
            if not isinstance(op, Use):
                return op
            new = done[op.node]
            if isinstance(new, Node):
                return Use(new, op.result, op.pick)
            assert op.pick is None, "an operand replaces a batched node's member"
            return new

        for node in self.nodes:
            new = replace(node, operands=tuple(map(operand, node.operands)))
            result = rule(new)
            if result is None:
                result = new
            done[node] = result
            if isinstance(result, Node):
                nodes[result] = None
        outputs = [
            replace(out, use=_as_use(operand(out.use), out, nodes), pad=operand(out.pad))
            for out in self.outputs
        ]
        return Graph(self.dims, list(nodes), outputs, self.groups)


def _as_use(op: Operand, out: Output, nodes: dict[Node, None]) -> Use:
    """An output that became a constant still needs a node to write it."""
    if isinstance(op, Use):
        return op
    aval = out.use.aval
    node = Node("broadcast", (op,), (("axes", ()), ("shape", aval.shape)), (aval,), out.source)
    nodes[node] = None
    return Use(node)


def _short(values: Iterable[Any], limit: int = 6) -> str:
    items = [str(v) for v in values]
    if len(set(items)) == 1 and len(items) > 2:
        return f"{items[0]} x{len(items)}"
    return ",".join(items[:limit]) + (f",..x{len(items)}" if len(items) > limit else "")


def print_graph(graph: Graph) -> str:
    """The graph as text, one node a line, like a jaxpr."""
    ids = {node: f"%{i}" for i, node in enumerate(graph.nodes)}

    def show(op: Operand) -> str:
        if not isinstance(op, Use):
            return str(op)
        text = ids[op.node] + (f".{op.result}" if len(op.node.avals) > 1 else "")
        if op.pick is not None:
            text += f"@({_short(op.pick)})"
        return text

    lines = [f"graph({', '.join(graph.dims)}):"]
    for node in graph.nodes:
        types = ", ".join(map(str, node.avals))
        if node.prim == "input":
            groups = node.param("groups")
            where = "" if groups is None else f" groups({_short(groups)})"
            text = f"input {node.param('name')!r} {node.param('kind')}{where}"
        else:
            extra = [f"{k}={_param(v)}" for k, v in node.params if k != "shape"]
            text = " ".join([node.prim, *map(show, node.operands), *extra])
        batch = f"{node.n} x " if node.n is not None else ""
        stage = f"  # {node.source.stage}" if node.source.stage else ""
        lines.append(f"  {ids[node] + ':':6}{batch + types:22} = {text}{stage}")
    for out in graph.outputs:
        groups = "" if out.groups is None else f" groups({_short(out.groups)})"
        tail = " host" if out.host else ""
        tail += f" updates {out.updates!r}" if out.updates else f" pad {show(out.pad)}"
        lines.append(f"  out {out.name!r}{groups} = {show(out.use)}{tail}")
    return "\n".join(lines)


def _param(value: Any) -> str:
    return str(value) if isinstance(value, Dim) else str(getattr(value, "name", value))
