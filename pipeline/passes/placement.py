"""placement: which nodes the host computes and which the device, and the staging layout: the host
inputs that device nodes read, packed in one buffer behind a header of actual extents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepgraph.pipeline.errors import CompileError
from stepgraph.pipeline.ir import DTYPES, Graph, Node, Use, extent_of

ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """One host input in the staging buffer: byte offset and greatest byte size."""

    node: Node
    member: int
    offset: int
    nbytes: int


@dataclass
class Placement:
    """device, host: nodes by where they run (a node both need is in both); slots, nbytes: staging.

    The header is one int64 per symbolic dim: the step's actual extents.
    """

    device: frozenset[Node]
    host: frozenset[Node]
    slots: list[Slot]
    nbytes: int

    def __str__(self) -> str:
        lines = [f"device {len(self.device)} nodes, host {len(self.host)} nodes"]
        for slot in self.slots:
            groups = slot.node.param("groups")
            name = slot.node.param("name") + (f"[{groups[slot.member]}]" if groups else "")
            lines.append(f"  staged {name}: {slot.node.aval} at byte {slot.offset}")
        return "\n".join([*lines, f"staging {self.nbytes} bytes"])


def placement(graph: Graph, capacity: Mapping[str, int]) -> Placement:
    """Place every node. Raises CompileError if a host output depends on what only the device
    has."""
    device = _reachable(graph, host=False)
    host = _reachable(graph, host=True)
    for node in host:
        if node.prim == "input" and node.param("kind") != "host":
            names = [out.name for out in graph.outputs if out.host]
            raise CompileError(
                f"host outputs {names} depend on the {node.param('kind')} input "
                f"{node.param('name')!r}, which the host does not have\n  {node.source}"
            )
    offset = -(-8 * len(graph.dims) // ALIGN) * ALIGN
    slots = []
    for node in graph.inputs:
        if node.param("kind") != "host":
            continue
        for m in range(node.n or 1):
            nbytes = DTYPES[node.aval.dtype].itemsize
            for dim in node.aval.shape:
                nbytes *= extent_of(dim, capacity, m)
            slots.append(Slot(node, m, offset, nbytes))
            offset += -(-nbytes // ALIGN) * ALIGN
    return Placement(device, host, slots, offset)


def _reachable(graph: Graph, host: bool) -> frozenset[Node]:
    found: set[Node] = set()
    work = [
        op.node
        for out in graph.outputs
        if out.host == host
        for op in (out.use, out.pad)
        if isinstance(op, Use)
    ]
    while work:
        node = work.pop()
        if node not in found:
            found.add(node)
            work.extend(use.node for use in node.uses())
    return frozenset(found)
