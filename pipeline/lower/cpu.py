"""The CPU target's source: a buffer plan as one Python function for Numba.

The function takes one number, the address of its context, and finds everything there: so one text
serves every batch shape, every address and any number of groups. `Slot`s say what the context
holds; the runtime fills them in when it captures an executable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stepgraph.pipeline.ir import Consts, Dim, Extent, Lit, Node, Operand, Sizes, Use, extent_of
from stepgraph.pipeline.passes.buffers import Buffer, Fill, Plan
from stepgraph.pipeline.passes.fusion import Nest
from stepgraph.pipeline.primitives import PRIMITIVES, identity

from .scalar import WIDTH, expression, wrap
from .source import Count, Ints, Padded, Slot, Source, Staging, Table


def generate(plan: Plan) -> Source:
    """The text of the compiled step for `plan`."""
    return _Generator(plan).run()


@dataclass
class _Body:
    """Lines of one nest by loop level: 0 outside, 1 per member, 2 and 3 the loops; `after` the
    inner loop of a level."""

    lines: list[list[str]] = field(default_factory=lambda: [[], [], [], []])
    after: list[list[str]] = field(default_factory=lambda: [[], [], [], []])
    memo: dict[Any, tuple[str, int]] = field(default_factory=dict)


_LOOPS = ("", "", "i", "j")


class _Generator:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.graph = plan.schedule.graph
        self.number = {node: k for k, node in enumerate(self.graph.nodes)}
        self.slots: dict[Slot, int] = {Staging(): 0}
        self.kernels: dict[str, str] = {}
        self.body = _Body()
        self.nest: Nest = Nest(None, ())
        self.names = 0
        self.constants: dict[Any, str] = {}  # addresses and strides that hold for the whole step

    def run(self) -> Source:
        lines = []
        for i, nest in enumerate(self.plan.schedule.nests):
            lines += ["", f"# nest {i}: {nest}", *self._emit_nest(i, nest)]
        head = ["staging = ld8(ctx, 0)"]
        for k, dim in enumerate(self.graph.dims):
            head.append(f"{dim}_pad = {self._slot(Padded(dim))}")
            head.append(f"{dim} = imin(imax(ld8(staging, {k}), 0), {dim}_pad)")
        text = "\n".join(["def step(ctx):", *("    " + t if t else "" for t in [*head, *lines])])
        return Source(text + "\n", list(self.slots), self.kernels)

    # -- context

    def _slot(self, slot: Slot) -> str:
        return f"ld8(ctx, {self.slots.setdefault(slot, len(self.slots))})"

    def _name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def _once(self, key: Any, level: int, prefix: str, text: str) -> str:
        """A scalar computed once per iteration of `level`; what the context says, once a step."""
        if level == 0 and key[0] in ("table", "address", "stride", "ints"):
            if key not in self.constants:
                self.constants[key] = self._name(prefix)
                self.body.lines[0].append(f"{self.constants[key]} = {text}")
            return self.constants[key]
        if key not in self.body.memo and text.isidentifier():
            self.body.memo[key] = (text, level)
        elif key not in self.body.memo:
            name = self._name(prefix)
            self.body.lines[level].append(f"{name} = {text}")
            self.body.memo[key] = (name, level)
        return self.body.memo[key][0]

    def _members(self, use: Use, of: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The member of the operand that each member of the nest reads, through a reader whose own
        members are `of`."""
        return tuple(use.member(m) for m in (of or range(self.nest.n or 1)))

    def _array(self, use: Use) -> tuple[str, str, int]:
        """(address, row stride, level) of the member of the operand's buffer that is being read."""
        return self._member_of(self.plan.home[use.node, use.result], self._members(use))

    def _member_of(self, buffer: Buffer, members: tuple[int, ...]) -> tuple[str, str, int]:
        level = 1
        if len(set(members)) == 1:
            members, level = members[:1], 0
        table = Table(buffer, members)
        at = "2 * g" if level else "0"
        then = "2 * g + 1" if level else "1"
        base = self._once(("table", table), 0, "p", self._slot(table))
        address = self._once(("address", table), level, "a", f"ld8({base}, {at})")
        stride = "0"
        if len(buffer.aval.shape) == 2:
            stride = self._once(("stride", table), level, "s", f"ld8({base}, {then})")
        return address, stride, level

    def _static(self, values: tuple[int, ...]) -> tuple[str, int]:
        """A static integer per member."""
        if len(set(values)) == 1:
            return str(values[0]), 0
        ints = Ints(tuple((v,) for v in values))
        base = self._once(("ints", ints), 0, "p", self._slot(ints))
        return self._once(("int", ints), 1, "c", f"ld8({base}, g)"), 1

    def _extent(self, dim: Extent, members: Sequence[int] | None = None) -> tuple[str, int]:
        """A dim's actual extent; `members`: those of the operand that the nest's members read."""
        if isinstance(dim, Sizes):
            return self._static(tuple(dim.values[m] for m in members or range(self.nest.n or 1)))
        if isinstance(dim, Dim):
            return (f"({dim.name} {dim.offset:+d})" if dim.offset else dim.name), 0
        return str(dim), 0

    # -- operands

    def _load(
        self, use: Use, members: tuple[int, ...], indices: Sequence[tuple[str, int]]
    ) -> tuple[str, int]:
        address, stride, level = self._member_of(self.plan.home[use.node, use.result], members)
        level = max([level, *(lv for _, lv in indices)])
        place = "0" if not indices else indices[0][0]
        if len(indices) == 2:
            place = f"{indices[0][0]} * {stride} + {indices[1][0]}"
        text = f"ld{WIDTH[use.aval.dtype]}({address}, {place})"
        return self._once(("load", text), level, "x", text), level

    def _scalar(self, op: Operand) -> tuple[str, int]:
        """An operand as a scalar at the index the nest is at."""
        if isinstance(op, Use) and self.plan.schedule.in_scalar(op, self.nest):
            return self.body.memo[op.node]
        rank = len(op.aval.shape) if isinstance(op, Use) else 0
        here = [(_LOOPS[2 + axis], 2 + axis) for axis in range(rank)]
        return self._value(op, tuple(range(self.nest.n or 1)), here)

    def _value(
        self, op: Operand, of: tuple[int, ...], indices: Sequence[tuple[str, int]]
    ) -> tuple[str, int]:
        """An operand of a node whose members are `of`, at `indices`: loaded, or computed here."""
        if isinstance(op, Lit):
            return str(op.value), 0
        if isinstance(op, Consts):
            return self._static(tuple(op.values[m] for m in of))
        node = op.node
        if (node, op.result) in self.plan.home:
            return self._load(op, self._members(op, of), indices)
        if node not in self.plan.schedule.inlined:
            return f"v{self.number[node]}", 0  # a scalar of the whole step
        members = self._members(op, of)
        key = (node, members, tuple(indices))
        if key not in self.body.memo:
            text, level = self._expression(node, members, indices)
            self._once(key, level, "y", text)
        return self.body.memo[key]

    # -- nests

    def _emit_nest(self, index: int, nest: Nest) -> list[str]:
        self.body, self.nest = _Body(), nest
        if nest.opaque:
            self._opaque(nest.nodes[0])
        else:
            for node in nest.nodes:
                self._node(node)
                self._stores(index, node)
        own = [
            f
            for f in self.plan.fills[index]
            if f.buffer.n == nest.n and not (isinstance(f.pad, Use) and f.pad.node in nest.nodes)
        ]
        for fill in own:
            self._fill(fill, 1)
        lines = self._loops(self.nest)
        for fill in self.plan.fills[index]:
            if fill not in own:
                self.body, self.nest = _Body(), Nest(fill.buffer.n, ())
                self._fill(fill, 1)
                lines += self._loops(self.nest)
        return lines

    def _loops(self, nest: Nest) -> list[str]:
        body = self.body
        heads = ["", "", "", ""]
        if nest.n is not None:
            heads[1] = f"for g in range({self._slot(Count(nest.n))}):"
        for axis, dim in enumerate(nest.shape if not nest.opaque else ()):
            heads[2 + axis] = f"for {_LOOPS[2 + axis]} in range({self._extent(dim)[0]}):"
        lines = list(body.lines[0])
        indent, closing = "", []
        for level in (1, 2, 3):
            inner = [x for lv in range(level, 4) for x in (*body.lines[lv], *body.after[lv])]
            if not inner:
                break
            if heads[level]:
                lines.append(indent + heads[level])
                indent += "    "
            lines += [indent + text for text in body.lines[level]]
            closing.append((indent, body.after[level]))
        for indent, after in reversed(closing):
            lines += [indent + text for text in after]
        return lines + body.after[0]

    def _node(self, node: Node) -> None:
        loop = PRIMITIVES[node.prim].loop
        if loop in ("scan", "reduce"):
            self._scan(node)
            return
        name = f"v{self.number[node]}"
        here = [(_LOOPS[2 + axis], 2 + axis) for axis in range(len(self.nest.shape))]
        text, level = self._expression(node, tuple(range(self.nest.n or 1)), here)
        if text.isidentifier() and self.nest.shape:
            name = text  # another name for a scalar of this nest
        else:
            self.body.lines[level].append(f"{name} = {text}")
        self.body.memo[node] = (name, level)

    def _expression(
        self, node: Node, of: tuple[int, ...], indices: Sequence[tuple[str, int]]
    ) -> tuple[str, int]:
        """(text, level) of an elementwise node at `indices`, for the members `of`."""
        if node.prim == "iota":
            return indices[0]
        if node.prim == "extent":
            return self._extent(node.param("size"), of)
        if node.prim == "broadcast":
            (op,) = node.operands
            shape = op.aval.shape if isinstance(op, Use) else ()
            axes = zip(shape, node.param("axes"), strict=True)
            return self._value(op, of, [("0", 0) if d == 1 else indices[a] for d, a in axes])
        if node.prim == "gather":
            return self._gather(node)
        scalars = []
        for op in node.operands:
            here = indices if isinstance(op, Use) and op.aval.shape else ()
            inside = isinstance(op, Use) and self.plan.schedule.in_scalar(op, self.nest)
            scalars.append(
                self._scalar(op)
                if inside and node in self.nest.nodes
                else self._value(op, of, here)
            )
        return expression(node, [s for s, _ in scalars]), max([lv for _, lv in scalars], default=0)

    def _gather(self, node: Node) -> tuple[str, int]:
        operand, fill, *indices = node.operands
        assert isinstance(operand, Use)
        address, stride, level = self._array(operand)
        places = [self._scalar(op) for op in indices]
        guard = []
        for (text, _), dim in zip(places, operand.aval.shape, strict=True):
            size, lv = self._extent(dim, self._members(operand))
            level = max(level, lv)
            guard.append(f"0 <= {text} < {size}")
        outside, lv = self._scalar(fill)
        level = max([level, lv, *(lv for _, lv in places)])
        place = places[0][0]
        if len(places) == 2:
            place = f"{place} * {stride} + {places[1][0]}"
        load = f"ld{WIDTH[operand.aval.dtype]}({address}, {place})"
        return f"{load} if {' and '.join(guard)} else {outside}", level

    def _scan(self, node: Node) -> None:
        inner = 1 + len(self.nest.shape)
        outer = inner - 1 if (inner > 2 or self.nest.n is not None) else 0
        acc = f"v{self.number[node]}"
        value, _ = self._scalar(node.operands[0])
        dtype, lines = node.aval.dtype, self.body.lines
        if node.prim == "reduce":
            op = node.param("op")
            lines[outer].append(f"{acc} = {identity(op, dtype)}")
            step = wrap(dtype, f"{acc} + {value}") if op == "sum" else f"i{op}({acc}, {value})"
            lines[inner].append(f"{acc} = {step}")
            self.body.memo[node] = (acc, outer)
            return
        lines[outer].append(f"r{acc} = 0")
        if node.param("mode") == "exclusive":
            lines[inner].append(f"{acc} = r{acc}")
        lines[inner].append(f"r{acc} = {wrap(dtype, f'r{acc} + {value}')}")
        if node.param("mode") != "exclusive":
            lines[inner].append(f"{acc} = r{acc}")
        self.body.memo[node] = (acc, inner)

    def _stores(self, index: int, node: Node) -> None:
        shape = self.nest.shape
        for store in self.plan.stores[index]:
            if store.use.node is not node:
                continue
            address, stride, _ = self._array_of_store(store.buffer)
            st = f"st{WIDTH[node.aval.dtype]}"
            value, level = self.body.memo[node]
            if node.prim == "reduce":
                place = "i" if len(shape) == 2 else "0"
                self.body.after[level].append(f"{st}({address}, {place}, {value})")
                continue
            inner = 1 + len(shape) if shape else (1 if self.nest.n is not None else 0)
            place = ("0", "i", f"i * {stride} + j")[len(shape)]
            if node.prim == "cumsum" and node.param("mode") == "offsets":
                before = 1 if self.nest.n is not None else 0
                self.body.lines[before].append(f"{st}({address}, 0, 0)")
                place = "i + 1"
            self.body.lines[inner].append(f"{st}({address}, {place}, {value})")

    def _array_of_store(self, buffer: Buffer) -> tuple[str, str, int]:
        return self._member_of(buffer, tuple(range(buffer.n or 1)))

    def _fill(self, fill: Fill, level: int) -> None:
        """The pad, from the actual to the padded extent, after the member's loops."""
        buffer, after = fill.buffer, self.body.after[level]
        address, stride, _ = self._array_of_store(buffer)
        value = self._pad_value(fill)
        fn, shape = f"fill{WIDTH[buffer.aval.dtype]}", buffer.aval.shape
        actual = [self._extent(dim)[0] for dim in shape]
        padded = [
            f"({dim.name}_pad {dim.offset:+d})" if isinstance(dim, Dim) else text
            for dim, text in zip(shape, actual, strict=True)
        ]
        if len(shape) == 1:
            after.append(f"{fn}({address}, {actual[0]}, {padded[0]}, {value})")
            return
        row = self._name("row")
        if isinstance(shape[1], Dim):
            after.append(f"for {row} in range({actual[0]}):")
            after.append(
                f"    {fn}({address}, {row} * {stride} + {actual[1]}, "
                f"{row} * {stride} + {padded[1]}, {value})"
            )
        if isinstance(shape[0], Dim):
            after.append(f"for {row} in range({actual[0]}, {padded[0]}):")
            after.append(
                f"    {fn}({address}, {row} * {stride}, {row} * {stride} + {padded[1]}, {value})"
            )

    def _pad_value(self, fill: Fill) -> str:
        pad = fill.pad
        if isinstance(pad, Use) and (pad.node, pad.result) in self.plan.home:
            return self._load(pad, self._members(pad), [])[0]
        return self._scalar(pad)[0]

    # -- nodes with loops of their own

    def _opaque(self, node: Node) -> None:
        if node.prim == "custom_call":
            self._custom_call(node)
        elif node.prim == "scatter":
            self._scatter(node)
        else:
            (op,) = node.operands
            assert isinstance(op, Use)
            source, _, _ = self._array(op)
            out, _, _ = self._array_of_store(self.plan.home[node, 0])
            size, _ = self._extent(node.aval.shape[0])
            count, _ = self._extent(op.aval.shape[0], self._members(op))
            if node.prim == "segment_ids":
                wide = op.aval.dtype == "int64"
                text = f"segment_ids({source}, {wide}, imax({count} - 1, 0), {out}, {size})"
            else:
                text = f"compact({source}, {size}, {out}, {node.param('fill')})"
            self.body.lines[1].append(text)

    def _scatter(self, node: Node) -> None:
        state, update, *indices = node.operands
        assert isinstance(state, Use)
        shape = next((op.aval.shape for op in node.operands[1:] if isinstance(op, Use)), ())
        address, stride, _ = self._array(state)
        value = self._scalar(update)[0]
        places = [self._scalar(op)[0] for op in indices]
        sizes = [self._extent(dim, self._members(state))[0] for dim in state.aval.shape]
        guard = " and ".join(f"0 <= {p} < {s}" for p, s in zip(places, sizes, strict=True))
        place = places[0] if len(places) == 1 else f"{places[0]} * {stride} + {places[1]}"
        inner = 1 + len(shape)
        self.body.lines[inner] += [
            f"if {guard}:",
            f"    st{WIDTH[state.aval.dtype]}({address}, {place}, {value})",
        ]
        self.nest = Nest(node.n, shape)

    def _custom_call(self, node: Node) -> None:
        kernel, n = node.param("kernel"), node.n or 1
        self.kernels["kernel_" + kernel.name] = kernel.cpu
        params = {k: v for k, v in node.params if k != "kernel"}
        avals = [op.aval for op in node.operands if isinstance(op, Use)]
        rows = []
        for m in range(n):
            own = [
                _aval_of(a, op.member(m))
                for a, op in zip(avals, node.operands, strict=True)
                if isinstance(op, Use)
            ]
            given = {k: v.values[m] if isinstance(v, Sizes) else v for k, v in params.items()}
            rows.append(tuple(int(x) for x in kernel.attrs(own, given)))
        tables = [
            Table(self.plan.home[op.node, op.result], tuple(op.member(m) for m in range(n)))
            for op in node.operands
            if isinstance(op, Use)
        ]
        tables += [Table(self.plan.home[node, r], tuple(range(n))) for r in range(len(node.avals))]
        args = [self._slot(Count(n)), *kernel.extents(avals)]
        args += [self._slot(t) for t in tables] + [self._slot(Ints(tuple(rows)))]
        self.body.lines[0].append(f"kernel_{kernel.name}({', '.join(args)})")


def _aval_of(aval: Any, m: int) -> Any:
    from dataclasses import replace

    return replace(
        aval, shape=tuple(extent_of(d, {}, m) if isinstance(d, Sizes) else d for d in aval.shape)
    )
