"""cse: nodes that compute the same thing become one. What KV-cache groups share is found here."""

from __future__ import annotations

from typing import Any

from stepgraph.pipeline.ir import Graph, Node, Use

_NEVER = frozenset({"input"})


def cse(graph: Graph) -> Graph:
    """The graph with one node per distinct computation."""
    seen: dict[Any, Node] = {}

    def rule(node: Node) -> Node | Use | None:
        if node.prim in _NEVER or _in_place(node):
            return None
        return seen.setdefault(node.key(), node)

    return graph.rewrite(rule)


def _in_place(node: Node) -> bool:
    """Two updates of one state are two effects, even with equal operands."""
    return node.prim == "scatter" or (
        node.prim == "custom_call" and bool(node.param("kernel").in_place)
    )
