"""fusion: the graph becomes a short list of loop nests, one per iteration space where possible.

Nodes over the same space share a nest; a value read at the index being written is a scalar inside
it, and a scan is a running sum. A value that a later nest reads, or that is read at computed
places,
is stored, unless it is cheap to compute again (`inlined`: broadcasts, counters and one-cycle
arithmetic that only other spaces read). Kernels, scatters and ragged primitives are nests of their
own.

For a device (`device=True`) a scalar of the whole step is computed again by each thread that wants
it, where the CPU keeps it in a register between nests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stepgraph.pipeline.ir import Aval, Extent, Graph, Node, Output, Sizes, Use
from stepgraph.pipeline.primitives import PRIMITIVES


@dataclass(eq=False)
class Nest:
    """One loop nest: `n` members times `shape`, computing `nodes` in order.

    opaque: a single node with its own loops (kernel, scatter, segment_ids, compact).
    """

    n: int | None
    shape: tuple[Extent, ...]
    nodes: list[Node] = field(default_factory=list)
    opaque: bool = False

    def __str__(self) -> str:
        space = ",".join(map(str, self.shape))
        what = ", ".join(dict.fromkeys(n.source.stage or n.prim for n in self.nodes))
        return f"{'kernel' if self.opaque else 'loop'} {self.n or 1} x [{space}]: {what}"


@dataclass
class Schedule:
    """The nests in execution order, and the graph they compute (with copies made explicit)."""

    graph: Graph
    nests: list[Nest]
    nest_of: dict[Node, int]
    inlined: frozenset[Node]
    device: bool = False

    def __str__(self) -> str:
        return "\n".join(f"nest {i}: {nest}" for i, nest in enumerate(self.nests))

    def in_scalar(self, use: Use, nest: Nest) -> bool:
        """Is the operand a scalar of this nest (computed in it, at the index being written)?"""
        return not nest.opaque and use.node in nest.nodes and _aligned_with(use, nest)


# Not worth a store and a load. Division and gathers are.
CHEAP = frozenset(
    [
        "add",
        "sub",
        "neg",
        "min",
        "max",
        "and",
        "or",
        "xor",
        "not",
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
        "select",
        "cast",
        "copy",
        "broadcast",
        "iota",
        "extent",
    ]
)


# What a scalar of the whole step may be made of to be computed again.
AGAIN = CHEAP | {"mul", "floordiv", "mod", "gather"}


def fusion(graph: Graph, device: bool = False) -> Schedule:
    """Schedule `graph` into loop nests."""
    graph = _explicit_copies(graph)
    inlined = _inlined(graph, device)
    nests: list[Nest] = []
    nest_of: dict[Node, int] = {}

    def after(node: Node) -> int:
        """The first nest in which all that an inlined node reads is stored."""
        if node.prim == "input":
            return 0
        if node not in inlined:
            return nest_of[node] + 1
        return max([after(use.node) for use in node.uses()], default=0)

    for node in graph.nodes:
        if node.prim == "input" or node in inlined:
            continue
        n, shape = _space(node)
        opaque = PRIMITIVES[node.prim].loop == "opaque"
        first = 0
        for position, op in enumerate(node.operands):
            if not isinstance(op, Use):
                continue
            same = (
                op.node in nest_of
                and not opaque
                and PRIMITIVES[node.prim].aligned(position)
                and (nests[nest_of[op.node]].n, nests[nest_of[op.node]].shape) == (n, shape)
                and _aligned_with(op, nests[nest_of[op.node]])
            )
            first = max(first, nest_of[op.node] if same else after(op.node))
        place = next(
            (
                i
                for i in range(first, len(nests))
                if not opaque and not nests[i].opaque and (nests[i].n, nests[i].shape) == (n, shape)
            ),
            None,
        )
        if place is None:
            place = len(nests)
            nests.append(Nest(n, shape, opaque=opaque))
        nests[place].nodes.append(node)
        nest_of[node] = place
    return Schedule(graph, nests, nest_of, inlined, device)


def _inlined(graph: Graph, device: bool) -> frozenset[Node]:
    """Cheap nodes that no output stores, no reader needs in memory and no reader's nest
    computes."""
    readers: dict[Node, list[tuple[Node, int, Use]]] = {}
    for node in graph.nodes:
        for position, op in enumerate(node.operands):
            if isinstance(op, Use):
                readers.setdefault(op.node, []).append((node, position, op))
    stored = {out.use.node for out in graph.outputs}
    pads = {out.pad.node for out in graph.outputs if isinstance(out.pad, Use)}

    def candidate(node: Node) -> bool:
        step_scalar = node.n is None and not node.aval.shape
        if node in stored or (node in pads and not (device and step_scalar)):
            return False
        if node.prim not in (AGAIN if step_scalar else CHEAP) or (step_scalar and not device):
            return False
        for reader, position, use in readers.get(node, []):
            primitive = PRIMITIVES[reader.prim]
            if primitive.loop == "opaque" or (reader.prim == "gather" and position == 0):
                return False
            together = (
                not step_scalar
                and node.prim not in ("broadcast", "iota")
                and primitive.aligned(position)
                and _space(reader) == _space(node)
                and use.pick is None
            )
            if together:
                return False
        return True

    return frozenset(node for node in graph.nodes if candidate(node))


def _space(node: Node) -> tuple[int | None, tuple[Extent, ...]]:
    """What a node iterates over: its result, or the operand of a scan or reduction."""
    if PRIMITIVES[node.prim].loop in ("scan", "reduce"):
        (op,) = node.operands
        assert isinstance(op, Use)
        return node.n, op.aval.shape
    return node.n, node.aval.shape


def _aligned_with(use: Use, nest: Nest) -> bool:
    """Is `use` read at the index the nest is at, by the same member?"""
    node = use.node
    if node.prim == "reduce" or (node.prim == "cumsum" and node.param("mode") == "offsets"):
        return False
    return use.pick is None and node.n == nest.n and use.aval.shape == nest.shape


def _explicit_copies(graph: Graph) -> Graph:
    """Give every output a node of its own family that can store it where it is computed."""
    nodes = list(graph.nodes)
    taken: set[tuple[Node, int]] = set()
    outputs: list[Output] = []
    for out in graph.outputs:
        node = out.use.node
        n = len(out.groups) if out.groups is not None and len(out.groups) > 1 else None
        opaque = PRIMITIVES[node.prim].loop == "opaque"
        direct = node.prim != "input" and node.n == n and out.use.pick is None
        if opaque and (node, out.use.result) in taken:
            direct = False
        if out.updates is None and not direct:
            node = Node("copy", (out.use,), (), (_for_members(out, n),), out.source, n)
            nodes.append(node)
            out = replace(out, use=Use(node))
        taken.add((out.use.node, out.use.result))
        outputs.append(out)
    return replace(graph, nodes=nodes, outputs=outputs)


def _for_members(out: Output, n: int | None) -> Aval:
    """The abstract value of an output's copy: per-member extents follow the members it reads."""
    dims: list[Extent] = []
    for dim in out.use.aval.shape:
        if isinstance(dim, Sizes):
            picked = tuple(dim.values[out.use.member(m)] for m in range(n or 1))
            dim = picked[0] if len(set(picked)) == 1 else Sizes(picked)
        dims.append(dim)
    return replace(out.use.aval, shape=tuple(dims))
