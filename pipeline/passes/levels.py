"""levels: which nests and pads a device may run side by side.

A nest comes after those whose stored values it reads, and an update in place after all earlier
readers of what it overwrites. Between levels all threads wait for each other. What nobody waits for
goes to the last level, where most of the work then runs on the whole device at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stepgraph.pipeline.ir import Operand, Use

from .buffers import Buffer, Fill, Plan
from .fusion import Nest


@dataclass(frozen=True, eq=False)
class Item:
    """One nest of the plan, or the pad of one buffer."""

    index: int
    nest: Nest
    fill: Fill | None = None

    def __str__(self) -> str:
        if self.fill is not None:
            return f"pad of {self.fill.buffer.name}"
        return f"nest {self.index}: {self.nest}"


def levels(plan: Plan) -> list[list[Item]]:
    """The plan's nests and pads, level by level."""
    items: list[Item] = []
    before: dict[Item, set[Item]] = {}
    writer: dict[Buffer, Item] = {}
    readers: dict[Buffer, list[Item]] = {}
    for i, nest in enumerate(plan.schedule.nests):
        item = Item(i, nest)
        items.append(item)
        read = {b for node in nest.nodes for op in node.operands for b in _buffers(plan, op)}
        before[item] = {writer[b] for b in read if b in writer}
        for node in nest.nodes:
            for r in range(len(node.avals)):
                home = plan.home.get((node, r))
                if home is not None and home.kind == "input":
                    before[item].update(readers.get(home, []))
                    if home in writer:
                        before[item].add(writer[home])
                    writer[home] = item
        for b in read:
            readers.setdefault(b, []).append(item)
        writer.update((store.buffer, item) for store in plan.stores[i])
        before[item].discard(item)
    for i, fills in enumerate(plan.fills):
        for fill in fills:
            item = Item(i, Nest(fill.buffer.n, ()), fill)
            items.append(item)
            before[item] = {writer[b] for b in _buffers(plan, fill.pad) if b in writer}
    return _latest(items, before)


def _buffers(plan: Plan, op: Operand) -> Iterator[Buffer]:
    """What an operand reads from memory, also through nodes that are computed again."""
    if not isinstance(op, Use):
        return
    home = plan.home.get((op.node, op.result))
    if home is not None:
        yield home
    elif op.node in plan.schedule.inlined:
        for inner in op.node.operands:
            yield from _buffers(plan, inner)


def _latest(items: list[Item], before: dict[Item, set[Item]]) -> list[list[Item]]:
    """Each item at the last level that all who wait for it allow."""
    first: dict[Item, int] = {}
    for item in items:
        first[item] = 1 + max([first[b] for b in before[item]], default=-1)
    depth = 1 + max(first.values(), default=-1)
    last = dict.fromkeys(items, depth - 1)
    for item in reversed(items):
        for b in before[item]:
            last[b] = min(last[b], last[item] - 1)
    out: list[list[Item]] = [[] for _ in range(depth)]
    for item in items:
        out[last[item]].append(item)
    return out
