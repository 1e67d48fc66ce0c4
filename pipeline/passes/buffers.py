"""buffers: where every stored value lives.

Outputs get persistent buffers of their own, one per group and field (never shared, so no group can
read another's); values that only later nests need get scratch, reused when its last reader is done;
donated state is written in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from stepgraph.pipeline.errors import CompileError
from stepgraph.pipeline.ir import DTYPES, Aval, Graph, Node, Operand, Output, Use, extent_of
from stepgraph.pipeline.primitives import PRIMITIVES

from .fusion import Nest, Schedule
from .verify import overwrites


@dataclass(eq=False)
class Buffer:
    """Memory of one value: `n` members (None: one), each of the value's padded extent.

    kind: "input" (bound or staged), "output" (persistent) or "scratch".
    """

    kind: str
    name: str
    aval: Aval
    n: int | None
    groups: tuple[str, ...] | None = None
    first: int = 0
    last: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.n or 1} x {self.aval}"


@dataclass(frozen=True)
class Store:
    """A nest writes a value over the actual extent of a buffer, for all its members."""

    use: Use
    buffer: Buffer


@dataclass(frozen=True)
class Fill:
    """A nest writes the pad from the actual to the padded extent of a buffer, for all members."""

    pad: Operand
    buffer: Buffer


@dataclass
class Plan:
    """The schedule with memory: for each nest what it stores and fills, and each value's buffer."""

    schedule: Schedule
    buffers: list[Buffer]
    home: dict[tuple[Node, int], Buffer]
    stores: list[list[Store]]
    fills: list[list[Fill]]
    outputs: list[tuple[Output, Buffer]]
    scratch_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for i, nest in enumerate(self.schedule.nests):
            lines.append(f"nest {i}: {nest}")
            lines += [f"  store {s.buffer}" for s in self.stores[i]]
            lines += [f"  pad   {f.buffer.name} with {_show(f.pad)}" for f in self.fills[i]]
        lines.append(f"scratch {self.scratch_bytes} bytes")
        return "\n".join(lines)


def _show(pad: Operand) -> str:
    return "a value" if isinstance(pad, Use) else str(pad)


def assign_buffers(schedule: Schedule, capacity: Mapping[str, int]) -> Plan:
    """Assign buffers for extents up to `capacity`."""
    graph, nests = schedule.graph, schedule.nests
    plan = Plan(schedule, [], {}, [[] for _ in nests], [[] for _ in nests], [])
    for node in graph.inputs:
        buffer = Buffer("input", node.param("name"), node.aval, node.n, node.param("groups"))
        plan.buffers.append(buffer)
        plan.home[node, 0] = buffer
    _donated(plan)
    _outputs(plan, graph)
    _scratch(plan)
    _place_scratch(plan, capacity)
    return plan


def _donated(plan: Plan) -> None:
    """A kernel's or scatter's in-place result lives in its operand's buffer."""
    for node in plan.schedule.graph.nodes:
        places: dict[int, int] = {}
        if node.prim == "scatter":
            places = {0: 0}
        elif node.prim == "custom_call":
            places = dict(node.param("kernel").in_place)
        for result, operand in places.items():
            op = node.operands[operand]
            source = plan.home.get((op.node, op.result)) if isinstance(op, Use) else None
            if source is None or not isinstance(op, Use) or not _is_state(op):
                raise CompileError(
                    f"{node.prim} writes in place, so its operand {operand} must be an input of "
                    f"kind 'state' (or the result of another update of it)\n  {node.source}"
                )
            if op.pick is not None or op.node.n != node.n:
                raise CompileError(f"{node.prim} updates only some groups' state\n  {node.source}")
            plan.home[node, result] = source


def _is_state(use: Use) -> bool:
    node = use.node
    if node.prim == "input":
        return bool(node.param("kind") == "state")
    return any(isinstance(op, Use) and overwrites(node, op.node) for op in node.operands)


def _outputs(plan: Plan, graph: Graph) -> None:
    for out in graph.outputs:
        value = (out.use.node, out.use.result)
        if out.updates is not None:
            home = plan.home.get(value)
            if home is None or home.kind != "input" or home.name != out.updates:
                raise CompileError(
                    f"state {out.updates!r} must be updated by scatter() or by a kernel that "
                    f"writes in place\n  {out.source}"
                )
            continue
        buffer = Buffer("output", out.name, out.use.aval, out.use.node.n, out.groups)
        plan.buffers.append(buffer)
        plan.outputs.append((out, buffer))
        i = plan.schedule.nest_of[out.use.node]
        plan.stores[i].append(Store(out.use, buffer))
        if any(not isinstance(dim, int) for dim in out.use.aval.shape):
            last = i
            if isinstance(out.pad, Use):
                last = max(i, plan.schedule.nest_of.get(out.pad.node, i))
            plan.fills[last].append(Fill(out.pad, buffer))
        plan.home.setdefault(value, buffer)


def _scratch(plan: Plan) -> None:
    """Values that another nest reads, or that are read at computed places, are stored."""
    schedule = plan.schedule
    for i, nest in enumerate(schedule.nests):
        for use, direct in reads(schedule, nest):
            if not direct or not _local(schedule, use, nest):
                _keep(plan, use)
        for fill in plan.fills[i]:
            for use in _values(schedule, fill.pad):
                if not _in_register(schedule, use):
                    _keep(plan, use)
        for node in nest.nodes:
            if _opaque(node):
                for result in range(len(node.avals)):
                    _keep(plan, Use(node, result))


def reads(schedule: Schedule, nest: Nest) -> Iterator[tuple[Use, bool]]:
    """The computed values a nest reads; True for those it reads itself, not through an inlined
    node."""

    def visit(node: Node, direct: bool) -> Iterator[tuple[Use, bool]]:
        for use in node.uses():
            if use.node in schedule.inlined:
                yield from visit(use.node, False)
            elif use.node.prim != "input":
                yield use, direct or _in_register(schedule, use)

    for node in nest.nodes:
        yield from visit(node, True)


def _values(schedule: Schedule, op: Operand) -> Iterator[Use]:
    """The computed values that an operand is made of, through inlined nodes."""
    if isinstance(op, Use) and op.node in schedule.inlined:
        for inner in op.node.operands:
            yield from _values(schedule, inner)
    elif isinstance(op, Use) and op.node.prim != "input":
        yield op


def _in_register(schedule: Schedule, use: Use) -> bool:
    """Does every nest have the value without a load? On the CPU, scalars of the whole step."""
    if use.node in schedule.inlined:
        return True
    scalar = use.node.n is None and not use.aval.shape and not _opaque(use.node)
    return scalar and not schedule.device


def _local(schedule: Schedule, use: Use, nest: Nest) -> bool:
    return _in_register(schedule, use) or schedule.in_scalar(use, nest)


def _opaque(node: Node) -> bool:
    return PRIMITIVES[node.prim].loop == "opaque"


def _keep(plan: Plan, use: Use) -> None:
    value = (use.node, use.result)
    if value in plan.home:
        return
    i = plan.schedule.nest_of[use.node]
    buffer = Buffer("scratch", f"t{len(plan.buffers)}", use.aval, use.node.n, first=i)
    plan.buffers.append(buffer)
    plan.home[value] = buffer
    plan.stores[i].append(Store(Use(use.node, use.result), buffer))


def member_bytes(buffer: Buffer, capacity: Mapping[str, int], m: int) -> int:
    """Bytes of one member at the greatest extents, rounded up to whole cache lines."""
    count = 1
    for dim in buffer.aval.shape:
        count *= extent_of(dim, capacity, m)
    return -(-count * DTYPES[buffer.aval.dtype].itemsize // 64) * 64


def _place_scratch(plan: Plan, capacity: Mapping[str, int]) -> None:
    """Linear scan: scratch whose last reader is done gives its bytes to a later value; not on a
    device, where nests run side by side."""
    scratch = [b for b in plan.buffers if b.kind == "scratch"]
    for buffer in scratch:
        buffer.last = buffer.first
    for i, nest in enumerate(plan.schedule.nests):
        uses = [use for use, _ in reads(plan.schedule, nest)]
        uses += [f.pad for f in plan.fills[i] if isinstance(f.pad, Use)]
        for use in uses:
            home = plan.home.get((use.node, use.result))
            if home is not None:
                home.last = max(home.last, i)
    placed: list[tuple[Buffer, int]] = []
    for buffer in sorted(scratch, key=lambda b: b.first):
        size = sum(member_bytes(buffer, capacity, m) for m in range(buffer.n or 1))
        busy = sorted(
            (b.offset, b.offset + s)
            for b, s in placed
            if b.last >= buffer.first or plan.schedule.device
        )
        offset = 0
        for start, end in busy:
            if offset + size <= start:
                break
            offset = max(offset, end)
        buffer.offset = offset
        placed.append((buffer, size))
        plan.scratch_bytes = max(plan.scratch_bytes, offset + size)
