"""group_batching: the same computation in several groups becomes one node with members.

Two nodes are *alike* if they apply one primitive with the same parameters to operands that are the
same value or are alike themselves; scalar constants, static widths and integer kernel parameters
may differ. Alike nodes become members of one batched node if they serve different groups: code
size, compile time and launches then do not grow with the number of groups.

A batched node has as many members as there are *distinct* computations, which may be fewer than the
groups that read them (ten groups with two block sizes need two column indices, not ten): readers
then say by `Use.pick` which member they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepgraph.pipeline.ir import Aval, Consts, Graph, Lit, Node, Operand, Output, Sizes, Use

from .verify import overwrites


def group_batching(graph: Graph) -> Graph:
    """The graph with alike nodes of different groups merged."""
    families = _families(graph)
    member = {node: (f, m) for f, fam in enumerate(families) for m, node in enumerate(fam)}
    made: dict[int, Node] = {}

    def operand(ops: Sequence[Operand], n: int | None) -> Operand:
        """One operand position of all members of a family."""
        first = ops[0]
        if isinstance(first, Lit):
            values = tuple(op.value for op in ops if isinstance(op, Lit))
            return first if len(set(values)) == 1 else Consts(values, first.dtype)
        assert isinstance(first, Use)
        places = [member[op.node] for op in ops if isinstance(op, Use)]
        node = made[places[0][0]]
        if node.n is None:
            return Use(node, first.result)
        pick = tuple(m for _, m in places)
        same = n is not None and pick == tuple(range(node.n))
        return Use(node, first.result, None if same else pick)

    for f, family in enumerate(families):
        n = len(family) if len(family) > 1 else None
        first = family[0]
        columns = zip(*(node.operands for node in family), strict=True)
        made[f] = Node(
            first.prim,
            tuple(operand(ops, n) for ops in columns),
            _merge_params(family),
            tuple(
                _merge_avals([node.avals[i] for node in family]) for i in range(len(first.avals))
            ),
            first.source,
            n,
        )
    outputs = _merge_outputs(graph.outputs, member, made)
    return Graph(graph.dims, list(made.values()), outputs, graph.groups)


def _served(graph: Graph) -> dict[Node, frozenset[str]]:
    """The groups whose outputs (or own inputs) a node serves."""
    served: dict[Node, set[str]] = {node: set() for node in graph.nodes}
    for out in graph.outputs:
        for op in (out.use, out.pad):
            if isinstance(op, Use):
                served[op.node].update(out.groups or ("",))
    for node in reversed(graph.nodes):
        if node.prim == "input" and node.param("groups"):
            served[node].update(node.param("groups"))
        for use in node.uses():
            served[use.node] |= served[node]
    return {node: frozenset(groups) for node, groups in served.items()}


def _families(graph: Graph) -> list[list[Node]]:
    """Alike nodes of disjoint groups, in topological order of the families.

    A state and what overwrites it are batched alike, member by member: states whose updates differ
    are kept apart.
    """
    served = _served(graph)
    writer = {
        use.node: node for node in graph.nodes for use in node.uses() if overwrites(node, use.node)
    }
    apart: dict[Node, Any] = {}
    while True:
        families = _alike(graph, served, apart)
        place = {node: f for f, family in enumerate(families) for node in family}
        for family in families:
            updates = [place[writer[node]] if node in writer else -1 for node in family]
            if len(set(updates)) > 1:
                apart.update({n: (apart.get(n), u) for n, u in zip(family, updates, strict=True)})
                break
        else:
            break
    order = {g.name: i for i, g in enumerate(graph.groups)}
    for family in families:
        if len(family) > 1:
            family.sort(key=lambda node: min(order.get(g, 0) for g in served[node]))
    return families


def _alike(
    graph: Graph, served: dict[Node, frozenset[str]], apart: dict[Node, Any]
) -> list[list[Node]]:
    family_of: dict[Node, int] = {}
    families: list[list[Node]] = []
    groups_of: list[set[str]] = []
    by_key: dict[Any, list[int]] = {}
    for node in graph.nodes:
        groups = served[node]
        key = (_likeness(node, family_of), apart.get(node))
        place = None
        if groups and "" not in groups:
            candidates = by_key.setdefault(key, [])
            place = next((f for f in candidates if not groups_of[f] & groups), None)
        if place is None:
            place = len(families)
            families.append([])
            groups_of.append(set())
            by_key.setdefault(key, []).append(place)
        families[place].append(node)
        groups_of[place] |= groups
        family_of[node] = place
    # A family's operands belong to families with smaller numbers (the first member's operands came
    # before it, and all members' operands are in the same families): the order is topological.
    return families


def _likeness(node: Node, family_of: dict[Node, int]) -> Any:
    def operand(op: Operand) -> Any:
        if isinstance(op, Use):
            # a broadcast reads a dim of extent 1 in another way than the others
            ones = tuple(d == 1 for d in op.aval.shape) if node.prim == "broadcast" else ()
            return ("value", family_of[op.node], op.result, ones)
        return ("constant", op.dtype)

    return (
        node.prim,
        tuple(map(operand, node.operands)),
        tuple((k, _blur(k, v, node)) for k, v in node.params),
        tuple(_blur_aval(a) for a in node.avals),
        node.n,
    )


def _blur(name: str, value: Any, node: Node) -> Any:
    """A parameter with what may differ between members taken out."""
    if isinstance(value, Aval):
        return _blur_aval(value)
    if node.prim == "input" and name == "groups":
        return value is None
    if name in ("shape", "size"):
        dims = value if isinstance(value, tuple) else (value,)
        return tuple("static" if isinstance(d, int) else d for d in dims)
    if node.prim == "custom_call" and type(value) is int:
        return "static"
    return value


def _blur_aval(aval: Aval) -> Any:
    dims = tuple("static" if isinstance(d, int) else d for d in aval.shape)
    return (dims, aval.dtype, aval.unit)


def _merge_params(family: Sequence[Node]) -> tuple[tuple[str, Any], ...]:
    first = family[0]
    if len(family) == 1:
        return first.params
    merged: list[tuple[str, Any]] = []
    for name, value in first.params:
        values = [node.param(name) for node in family]
        if isinstance(value, Aval):
            merged.append((name, _merge_avals(values)))
        elif first.prim == "input" and name == "groups":
            merged.append((name, tuple(v[0] for v in values)))
        elif name == "shape":
            merged.append((name, _merge_avals([Aval(v, "int32") for v in values]).shape))
        elif type(value) is int and len(set(values)) > 1:
            merged.append((name, Sizes(tuple(values))))
        else:
            merged.append((name, value))
    return tuple(merged)


def _merge_avals(avals: Sequence[Aval]) -> Aval:
    first = avals[0]
    if all(a == first for a in avals):
        return first
    dims: list[Any] = []
    for sizes in zip(*(a.shape for a in avals), strict=True):
        dims.append(sizes[0] if len(set(sizes)) == 1 else Sizes(tuple(sizes)))
    return replace(first, shape=tuple(dims))


def _merge_outputs(
    outputs: Sequence[Output], member: dict[Node, tuple[int, int]], made: dict[int, Node]
) -> list[Output]:
    """One output per field and family, its groups as members."""
    merged: dict[Any, list[Output]] = {}
    for i, out in enumerate(outputs):
        shared = out.groups is None
        pad = ("use", member[out.pad.node][0]) if isinstance(out.pad, Use) else ("constant",)
        place = i if shared else (member[out.use.node][0], out.use.result)
        key = (out.name, out.updates, out.host, place, pad)
        merged.setdefault(key, []).append(out)
    result = []
    for outs in merged.values():
        first = outs[0]
        node = made[member[first.use.node][0]]
        if first.groups is None:
            use: Use = Use(node, first.use.result, _single(node, member[first.use.node][1]))
            result.append(replace(first, use=use, pad=_pad(first, member, made)))
            continue
        picks = tuple(member[o.use.node][1] for o in outs)
        whole = node.n is not None and picks == tuple(range(node.n))
        use = Use(node, first.use.result, None if node.n is None or whole else picks)
        pads = [_pad(o, member, made) for o in outs]
        groups = tuple(o.groups[0] for o in outs if o.groups)
        result.append(replace(first, use=use, groups=groups, pad=_merge_pads(pads)))
    return result


def _single(node: Node, m: int) -> tuple[int, ...] | None:
    return None if node.n is None else (m,)


def _pad(out: Output, member: dict[Node, tuple[int, int]], made: dict[int, Node]) -> Operand:
    if not isinstance(out.pad, Use):
        return out.pad
    f, m = member[out.pad.node]
    return Use(made[f], out.pad.result, _single(made[f], m))


def _merge_pads(pads: Sequence[Operand]) -> Operand:
    first = pads[0]
    if len(pads) == 1 or all(p == first for p in pads):
        return (
            replace(first, pick=None) if isinstance(first, Use) and first.node.n is None else first
        )
    if isinstance(first, Use):
        picks = tuple(p.pick[0] if p.pick else 0 for p in pads if isinstance(p, Use))
        whole = first.node.n is not None and picks == tuple(range(first.node.n))
        return replace(first, pick=None if whole else picks)
    return Consts(tuple(p.value for p in pads if isinstance(p, Lit)), first.dtype)
