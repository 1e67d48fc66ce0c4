"""dce: nodes that no output needs are dropped. Inputs stay: they are the caller's contract."""

from __future__ import annotations

from dataclasses import replace

from stepgraph.pipeline.ir import Graph, Node, Use


def dce(graph: Graph) -> Graph:
    """The graph without unused nodes."""
    live: set[Node] = set()
    roots = [op for out in graph.outputs for op in (out.use, out.pad) if isinstance(op, Use)]
    work = [use.node for use in roots]
    while work:
        node = work.pop()
        if node not in live:
            live.add(node)
            work.extend(use.node for use in node.uses())
    return replace(graph, nodes=[n for n in graph.nodes if n in live or n.prim == "input"])
