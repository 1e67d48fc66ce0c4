"""The passes, each a function Graph -> Graph. `run` applies them in order and can hand out every
intermediate graph, so that each can be printed before and after."""

from __future__ import annotations

from collections.abc import Callable

from stepgraph.pipeline.ir import Graph

from .cse import cse
from .dce import dce
from .group_batching import group_batching
from .simplify import simplify
from .verify import verify

Pass = Callable[[Graph], Graph]

PASSES: tuple[Pass, ...] = (verify, simplify, cse, dce, group_batching, cse, dce, verify)


def run(graph: Graph, on_pass: Callable[[str, Graph], None] | None = None) -> Graph:
    """The optimised graph. `on_pass(name, graph)` is called with the traced graph ("trace") and
    after each pass."""
    if on_pass is not None:
        on_pass("trace", graph)
    for each in PASSES:
        graph = each(graph)
        if on_pass is not None:
            on_pass(each.__name__, graph)
    return graph


__all__ = ["PASSES", "cse", "dce", "group_batching", "run", "simplify", "verify"]
