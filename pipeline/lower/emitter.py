"""What all targets' generators share: operands, addresses and extents of a buffer plan as text.

The text works on one number, the address of a context, and finds everything there: so one text
serves every batch shape, every address and any number of groups. `Slot`s say what the context
holds; the runtime fills them in when it captures an executable.

A nest's lines are kept by loop level: 0 outside, 1 per member, 2 and 3 the loops over the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stepgraph.pipeline.ir import Consts, Dim, Extent, Lit, Node, Operand, Sizes, Use
from stepgraph.pipeline.passes.buffers import Buffer, Fill, Plan
from stepgraph.pipeline.passes.fusion import Nest
from stepgraph.pipeline.primitives import PRIMITIVES

from .scalar import WIDTH, Dialect, expression
from .source import Count, Ints, Slot, Staging, Table

LOOPS = ("", "", "i", "j")


@dataclass
class Body:
    """Lines of one nest by loop level; `after` the inner loop of a level."""

    lines: list[list[Any]] = field(default_factory=lambda: [[], [], [], []])
    after: list[list[Any]] = field(default_factory=lambda: [[], [], [], []])
    memo: dict[Any, tuple[str, int]] = field(default_factory=dict)


class Emitter:
    """Base of the generators. `dialect`: the target's language."""

    def __init__(self, plan: Plan, dialect: Dialect) -> None:
        self.plan = plan
        self.dialect = dialect
        self.graph = plan.schedule.graph
        self.number = {node: k for k, node in enumerate(self.graph.nodes)}
        self.slots: dict[Slot, int] = {Staging(): 0}
        self.kernels: dict[str, str] = {}
        self.body = Body()
        self.nest: Nest = Nest(None, ())
        self.names = 0

    # -- what a target may say in its own way

    def let(self, name: str, text: str) -> Any:
        """A statement that names a value."""
        return f"{name} = {text}"

    # -- context

    def slot(self, slot: Slot) -> str:
        return self.context_load("ctx", str(self.slots.setdefault(slot, len(self.slots))))

    def context_load(self, base: str, place: str) -> str:
        return f"ld8({base}, {place})"

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def once(self, key: Any, level: int, prefix: str, text: str) -> str:
        """A scalar computed once per iteration of `level`."""
        if key not in self.body.memo and text.isidentifier():
            self.body.memo[key] = (text, level)
        elif key not in self.body.memo:
            name = self.name(prefix)
            self.body.lines[level].append(self.let(name, text))
            self.body.memo[key] = (name, level)
        return self.body.memo[key][0]

    def members(self, use: Use, of: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The member of the operand that each member of the nest reads, through a reader whose own
        members are `of`."""
        return tuple(use.member(m) for m in (of or range(self.nest.n or 1)))

    def array(self, use: Use) -> tuple[str, str, int]:
        """(address, row stride, level) of the member of the operand's buffer that is being read."""
        return self.member_of(self.plan.home[use.node, use.result], self.members(use))

    def array_of_store(self, buffer: Buffer) -> tuple[str, str, int]:
        return self.member_of(buffer, tuple(range(buffer.n or 1)))

    def member_of(self, buffer: Buffer, members: tuple[int, ...]) -> tuple[str, str, int]:
        level = 1
        if len(set(members)) == 1:
            members, level = members[:1], 0
        table = Table(buffer, members)
        at = "2 * g" if level else "0"
        then = "2 * g + 1" if level else "1"
        base = self.once(("table", table), 0, "p", self.slot(table))
        address = self.once(("address", table), level, "a", self.context_load(base, at))
        stride = "0"
        if len(buffer.aval.shape) == 2:
            stride = self.once(("stride", table), level, "s", self.context_load(base, then))
        return address, stride, level

    def static(self, values: tuple[int, ...]) -> tuple[str, int]:
        """A static integer per member."""
        if len(set(values)) == 1:
            return self.dialect.literal(values[0]), 0
        ints = Ints(tuple((v,) for v in values))
        base = self.once(("ints", ints), 0, "p", self.slot(ints))
        return self.once(("int", ints), 1, "c", self.context_load(base, "g")), 1

    # -- extents

    def extent(self, dim: Extent, members: Sequence[int] | None = None) -> tuple[str, int]:
        """A dim's actual extent; `members`: those of the operand that the nest's members read."""
        if isinstance(dim, Sizes):
            return self.static(tuple(dim.values[m] for m in members or range(self.nest.n or 1)))
        return self.symbol(dim), 0

    def symbol(self, dim: Extent, which: str = "len") -> str:
        """An extent that all members share. `which`: "len" the actual one, "pad" the padded one."""
        assert not isinstance(dim, Sizes), "an extent that differs between groups"
        if not isinstance(dim, Dim):
            return str(dim)
        name = f"{which}_{dim.name}"
        return f"({name} {dim.offset:+d})" if dim.offset else name

    def padded(self, dim: Extent) -> str:
        """A dim's padded extent."""
        return self.extent(dim)[0] if isinstance(dim, Sizes) else self.symbol(dim, "pad")

    # -- operands

    def load(
        self, use: Use, members: tuple[int, ...], indices: Sequence[tuple[str, int]]
    ) -> tuple[str, int]:
        address, stride, level = self.member_of(self.plan.home[use.node, use.result], members)
        level = max([level, *(lv for _, lv in indices)])
        place = self.place([text for text, _ in indices], stride)
        text = self.dialect.load(WIDTH[use.aval.dtype], address, place)
        return self.once(("load", text), level, "x", text), level

    def place(self, indices: Sequence[str], stride: str) -> str:
        """The element at `indices`, counted from the array's address."""
        if len(indices) == 2:
            return f"{indices[0]} * {stride} + {indices[1]}"
        return indices[0] if indices else "0"

    def scalar(self, op: Operand) -> tuple[str, int]:
        """An operand as a scalar at the index the nest is at."""
        if isinstance(op, Use) and self.plan.schedule.in_scalar(op, self.nest):
            return self.body.memo[op.node]
        rank = len(op.aval.shape) if isinstance(op, Use) else 0
        here = [(LOOPS[2 + axis], 2 + axis) for axis in range(rank)]
        return self.value(op, tuple(range(self.nest.n or 1)), here)

    def value(
        self, op: Operand, of: tuple[int, ...], indices: Sequence[tuple[str, int]]
    ) -> tuple[str, int]:
        """An operand of a node whose members are `of`, at `indices`: loaded, or computed here."""
        if isinstance(op, Lit):
            return self.dialect.literal(op.value), 0
        if isinstance(op, Consts):
            return self.static(tuple(op.values[m] for m in of))
        node = op.node
        if (node, op.result) in self.plan.home:
            return self.load(op, self.members(op, of), indices)
        if node not in self.plan.schedule.inlined:
            return f"v{self.number[node]}", 0  # a scalar of the whole step
        members = self.members(op, of)
        key = (node, members, tuple(indices))
        if key not in self.body.memo:
            text, level = self.expression(node, members, indices)
            self.once(key, level, "y", text)
        return self.body.memo[key]

    def expression(
        self, node: Node, of: tuple[int, ...], indices: Sequence[tuple[str, int]]
    ) -> tuple[str, int]:
        """(text, level) of an elementwise node at `indices`, for the members `of`."""
        if node.prim == "iota":
            return indices[0]
        if node.prim == "extent":
            return self.extent(node.param("size"), of)
        if node.prim == "broadcast":
            (op,) = node.operands
            shape = op.aval.shape if isinstance(op, Use) else ()
            axes = zip(shape, node.param("axes"), strict=True)
            return self.value(op, of, [("0", 0) if d == 1 else indices[a] for d, a in axes])
        if node.prim == "gather":
            return self.gather(node, of, indices)
        scalars = [self.argument(node, op, of, indices) for op in node.operands]
        text = expression(node, [s for s, _ in scalars], self.dialect)
        return text, max([lv for _, lv in scalars], default=0)

    def argument(
        self,
        node: Node,
        op: Operand,
        of: tuple[int, ...],
        indices: Sequence[tuple[str, int]],
    ) -> tuple[str, int]:
        """An operand of `node`, read at the index that `node` is computed at."""
        inside = isinstance(op, Use) and self.plan.schedule.in_scalar(op, self.nest)
        if inside and node in self.nest.nodes:
            return self.scalar(op)
        return self.value(op, of, indices if isinstance(op, Use) and op.aval.shape else ())

    def gather(
        self, node: Node, of: tuple[int, ...], indices: Sequence[tuple[str, int]]
    ) -> tuple[str, int]:
        operand, fill, *wanted = node.operands
        assert isinstance(operand, Use)
        members = self.members(operand, of)
        address, stride, level = self.member_of(
            self.plan.home[operand.node, operand.result], members
        )
        places = [self.argument(node, op, of, indices) for op in wanted]
        guards = []
        for (text, _), dim in zip(places, operand.aval.shape, strict=True):
            size, lv = self.extent(dim, members)
            level = max(level, lv)
            guards.append(self.dialect.inside(text, size))
        outside, lv = self.argument(node, fill, of, ())
        level = max([level, lv, *(lv for _, lv in places)])
        place = self.place([text for text, _ in places], stride)
        width = WIDTH[operand.aval.dtype]
        return self.dialect.guarded_load(width, address, place, guards, outside), level

    def pad_value(self, fill: Fill) -> str:
        pad = fill.pad
        if isinstance(pad, Use) and (pad.node, pad.result) in self.plan.home:
            return self.load(pad, self.members(pad), [])[0]
        return self.scalar(pad)[0]

    # -- kernels

    def kernel_call(self, node: Node, target: str) -> str:
        """The call of a hand-written kernel for all members: see pipeline/custom_call.py."""
        kernel, n = node.param("kernel"), node.n or 1
        self.kernels["kernel_" + kernel.name] = kernel.target(target)
        params = {k: v for k, v in node.params if k != "kernel"}
        operands = [op for op in node.operands if isinstance(op, Use)]
        rows = []
        for m in range(n):
            own = [op.aval.of_member(op.member(m)) for op in operands]
            given = {k: v.values[m] if isinstance(v, Sizes) else v for k, v in params.items()}
            rows.append(tuple(int(x) for x in kernel.attrs(own, given)))
        tables = [
            Table(self.plan.home[op.node, op.result], tuple(op.member(m) for m in range(n)))
            for op in operands
        ]
        tables += [Table(self.plan.home[node, r], tuple(range(n))) for r in range(len(node.avals))]
        args = [self.count(n)]
        args += [self.symbol(dim) for dim in kernel.extents([op.aval for op in operands])]
        args += [self.slot(t) for t in tables] + [self.slot(Ints(tuple(rows)))]
        return f"kernel_{kernel.name}({', '.join(args)})"

    def count(self, n: int) -> str:
        """The number of members, kept out of the text: 10 and 46 groups share one."""
        return self.slot(Count(n))


def loop_kind(nest: Nest) -> str:
    """ "opaque", "scan" (a scan or reduction is in it) or "elementwise"."""
    if nest.opaque:
        return "opaque"
    loops = {PRIMITIVES[node.prim].loop for node in nest.nodes}
    return "scan" if loops & {"scan", "reduce"} else "elementwise"
