"""coverage: the proof that every replay writes every persistent output of every group, over its
whole padded extent.

It reads the plan that targets are generated from, not the graph, so a pass that loses a store or
shares a buffer between groups cannot go unnoticed (the fault of vLLM PR 34874: fields left in the
first group's buffers while a captured graph reads the others').
"""

from __future__ import annotations

from stepgraph.pipeline.errors import CompileError

from .buffers import Buffer, Plan


def check_coverage(plan: Plan) -> None:
    """Raises CompileError naming the output and group that some replay would leave stale."""
    graph = plan.schedule.graph
    expected = {
        (out.name, group)
        for out in graph.outputs
        if out.updates is None
        for group in (out.groups or (None,))
    }
    owner: dict[int, tuple[str, str | None]] = {}
    stored: dict[tuple[str, str | None], str] = {}
    for out, buffer in plan.outputs:
        labels = [(out.name, g) for g in out.groups or (None,)]
        if (buffer.n or 1) != len(labels):
            raise CompileError(
                f"output {out.name!r}: {buffer.n or 1} buffers for the groups {out.groups}; "
                f"each group needs its own\n  {out.source}"
            )
        if id(buffer) in owner:
            raise CompileError(
                f"outputs {owner[id(buffer)][0]!r} and {out.name!r} share one buffer\n"
                f"  {out.source}"
            )
        owner[id(buffer)] = labels[0]
        writes = _whole_stores(plan, buffer)
        if writes == 0:
            raise CompileError(
                f"output {out.name!r} of {_who(labels)} is not written on a replay\n  {out.source}"
            )
        padded = any(not isinstance(dim, int) for dim in buffer.aval.shape)
        fills = sum(f.buffer is buffer for nest in plan.fills for f in nest)
        if padded and fills == 0:
            raise CompileError(
                f"output {out.name!r} of {_who(labels)} is not written past its actual extent: "
                f"a smaller step would leave the previous one's values\n  {out.source}"
            )
        stored.update((label, "written") for label in labels)
    missing = sorted(expected - set(stored), key=str)
    if missing:
        raise CompileError(f"outputs without a buffer: {missing}")


def _whole_stores(plan: Plan, buffer: Buffer) -> int:
    """Stores of the buffer by a nest that runs over all its members and its whole actual extent."""
    count = 0
    for nest, stores in zip(plan.schedule.nests, plan.stores, strict=True):
        for store in stores:
            if store.buffer is not buffer:
                continue
            value = store.use.node
            computed = value in nest.nodes
            same_members = value.n == buffer.n and store.use.pick is None
            same_extent = store.use.aval.shape == buffer.aval.shape
            if computed and same_members and same_extent:
                count += 1
    return count


def _who(labels: list[tuple[str, str | None]]) -> str:
    groups = [g for _, g in labels if g is not None]
    return f"group{'s' if len(groups) > 1 else ''} {', '.join(groups)}" if groups else "the step"
