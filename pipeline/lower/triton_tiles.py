"""The Triton target's source: a kernel whose programs go over tiles of elements.

The shape is the SIMT targets' (simt.py): `stepgraph_step(ctx, first, last)` runs the levels
first..last, with a barrier between them. Each nest and pad is a function of its own. A program's
lanes hold a tile of elements; a lane past the end repeats the last element and does not store
(`on`), so only gathers and stores have masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepgraph.pipeline.ir import Dim, Extent, Node, Sizes, Use
from stepgraph.pipeline.passes.buffers import Fill, Plan
from stepgraph.pipeline.passes.levels import Item, levels
from stepgraph.pipeline.primitives import PRIMITIVES, identity

from .emitter import LOOPS, Body, Emitter, loop_kind
from .scalar import WIDTH, Dialect, wrap
from .source import Padded, Source

TARGET = "triton"


def generate(plan: Plan) -> Source:
    """The text of the compiled step for `plan`, without its imports (see cuda/triton.py)."""
    return Tiles(plan, levels(plan)).run()


class Triton(Dialect):
    """Scalars and tiles of int64, with the functions of triton_memory.py."""

    def choose(self, condition: str, a: str, b: str) -> str:
        return f"choose({condition}, {a}, {b})"

    def inside(self, index: str, size: str) -> str:
        return f"((0 <= {index}) & ({index} < {size}))"

    def both(self, conditions: Sequence[str]) -> str:
        return " & ".join(f"({c})" for c in conditions)

    def guarded_load(
        self, width: int, address: str, place: str, guards: Sequence[str], outside: str
    ) -> str:
        return f"ldm{width}({address}, {place}, {self.both(guards)}, {outside})"


class Tiles(Emitter):
    def __init__(self, plan: Plan, by_level: list[list[Item]]) -> None:
        super().__init__(plan, Triton())
        self.levels = by_level
        self.dims = [f"{which}_{d}" for d in self.graph.dims for which in ("pad", "len")]

    def run(self) -> Source:
        functions: list[str] = []
        body = ["staging = ld8(ctx, 0)"]
        for k, dim in enumerate(self.graph.dims):
            body.append(f"pad_{dim} = {self.slot(Padded(dim))}")
            body.append(f"len_{dim} = imin(imax(ld8(staging, {k}), 0), pad_{dim})")
        body += ["block = tl.program_id(0).to(tl.int64)"]
        body += ["blocks = tl.num_programs(0).to(tl.int64)"]
        args = ", ".join(["ctx", "block", "blocks", *self.dims])
        for number, level in enumerate(self.levels):
            body.append(f"if (first <= {number}) & ({number} <= last):")
            for at, item in enumerate(level):
                name = f"item_{number}_{at}"
                lines = [f"# {item}", *self.item(item)]
                functions += ["@triton.jit", f"def {name}({args}):", *_indent(lines), "", ""]
                body.append(f"    {name}({args})  # {item}")
            body.append("    tl.debug_barrier()")
        kernel = ["@triton.jit(do_not_specialize=['ctx', 'first', 'last'])"]
        kernel += ["def stepgraph_step(ctx: tl.int64, first, last):", *_indent(body)]
        return Source(
            "\n".join([*functions, *kernel]) + "\n", list(self.slots), self.kernels, self.levels
        )

    # -- loops

    def item(self, item: Item) -> list[str]:
        self.body, self.nest = Body(), item.nest
        if item.fill is not None:
            return self.fill(item.fill)
        if item.nest.opaque:
            return self.opaque(item.nest.nodes[0])
        kind = loop_kind(item.nest)
        block = kind == "scan" and len(item.nest.shape) == 1
        for node in item.nest.nodes:
            self.node(node, block)
            self.stores(item.index, node, block)
        lines, after = self.body.lines, self.body.after
        n, shape = self.nest.n, self.nest.shape
        if block:
            return self.by_program(n, shape[0])
        if kind == "elementwise":
            loop = self.tiles(n, shape, lines[1], [*lines[2], *lines[3]])
            return [*lines[0], *loop]
        stop, inner = str(self.extent(shape[1])[0]), [*lines[3], *after[3]]
        if isinstance(shape[1], Sizes):
            stop = str(max(shape[1].values))
            size = self.extent(shape[1])[0]
            inner = [f"j = imin(column, {size} - 1)", f"here = on & (column < {size})", *inner]
        else:
            inner = ["j = column", "here = on", *inner]
        row = [*lines[2], f"for column in range(0, {stop}):", *_indent(inner), *after[2]]
        loop = self.tiles(n, shape[:1], lines[1], row)
        return [*lines[0], *loop]

    def by_program(self, n: int | None, size: Extent) -> list[str]:
        """One program per member, tile by tile with a carry."""
        lines, after = self.body.lines, self.body.after
        stop = self.extent(size)[0]
        tile = [
            "k = base + lanes()",
            f"on = k < {stop}",
            f"i = imin(k, {stop} - 1)",
            *lines[2],
        ]
        loop = [*lines[1], f"for base in range(0, {stop}, TILE):", *_indent(tile), *after[1]]
        if n is None:
            return ["if block == 0:", *_indent([*lines[0], *loop, *after[0]])]
        return [*lines[0], f"for g in range(block, {self.count(n)}, blocks):", *_indent(loop)]

    def tiles(
        self, n: int | None, shape: Sequence[Extent], member: list[str], inner: list[str]
    ) -> list[str]:
        """Tiles over members times shape; `member` lines may use g, `inner` ones also i and j."""
        sizes = [str(max(x.values)) if isinstance(x, Sizes) else self.symbol(x) for x in shape]
        limits = [
            f"{LOOPS[2 + axis]}, {self.extent(dim)[0]}"
            for axis, dim in enumerate(shape)
            if isinstance(dim, Sizes)
        ]
        clamp: list[str] = []
        for limit in limits:
            index, size = limit.split(", ")
            clamp += [f"on = on & ({index} < {size})", f"{index} = imin({index}, {size} - 1)"]
        return self.over(n, sizes, member, [*clamp, *inner])

    def over(
        self, n: int | None, sizes: Sequence[str], member: list[str], inner: list[str]
    ) -> list[str]:
        each = " * ".join(sizes) or "1"
        lines = ["k = base + lanes()", "on = k < total", "k = imin(k, total - 1)"]
        rest = "k"
        if n is not None:
            lines += ["g = div32(k, each)", "e = k - g * each"]
            rest = "e"
        if len(sizes) == 2:
            lines += [f"i = div32({rest}, {sizes[1]})", f"j = {rest} - i * ({sizes[1]})"]
        elif sizes:
            lines.append(f"i = {rest}")
        return [
            f"each = i64({each})",
            f"total = {self.count(n)} * each" if n is not None else "total = each",
            "for base in range(block * TILE, total, blocks * TILE):",
            *_indent([*lines, *member, *inner]),
        ]

    # -- nodes

    def node(self, node: Node, block: bool) -> None:
        loop = PRIMITIVES[node.prim].loop
        if loop == "scan":
            self.scan(node, block)
        elif loop == "reduce":
            self.reduce(node, block)
        else:
            name = f"v{self.number[node]}"
            here = [(LOOPS[2 + axis], 2 + axis) for axis in range(len(self.nest.shape))]
            text, level = self.expression(node, tuple(range(self.nest.n or 1)), here)
            if text.isidentifier() and self.nest.shape:
                name = text
            else:
                self.body.lines[level].append(self.let(name, text))
            self.body.memo[node] = (name, level)

    def reduce(self, node: Node, block: bool) -> None:
        op, dtype = node.param("op"), node.aval.dtype
        outer, inner = (1 if self.nest.n is not None else 0, 2) if block else (2, 3)
        acc, start = f"v{self.number[node]}", identity(op, dtype)
        value, _ = self.scalar(node.operands[0])
        mask = "on" if block else "here"
        mine = f"choose({mask}, {value}, {start})"
        if block:
            mine = f"reduce_{op}({mine})"
        step = wrap(dtype, f"{acc} + {mine}") if op == "sum" else f"i{op}({acc}, {mine})"
        self.body.lines[outer].append(f"{acc} = {'i64' if block else 'tile'}({start})")
        self.body.lines[inner].append(f"{acc} = {step}")
        self.body.memo[node] = (acc, outer)

    def scan(self, node: Node, block: bool) -> None:
        dtype, acc = node.aval.dtype, f"v{self.number[node]}"
        outer, inner = (1 if self.nest.n is not None else 0, 2) if block else (2, 3)
        value, _ = self.scalar(node.operands[0])
        lines, exclusive = self.body.lines[inner], node.param("mode") == "exclusive"
        self.body.lines[outer].append(f"r{acc} = {'i64' if block else 'tile'}(0)")
        if block:
            lines.append(f"m{acc} = choose(on, {value}, 0)")
            lines.append(f"t{acc} = {wrap(dtype, f'r{acc} + scan_sum(m{acc})')}")
            lines.append(f"{acc} = {wrap(dtype, f't{acc} - {value}') if exclusive else f't{acc}'}")
            lines.append(f"r{acc} = {wrap(dtype, f'r{acc} + reduce_sum(m{acc})')}")
        else:
            if exclusive:
                lines.append(f"{acc} = r{acc}")
            lines.append(f"r{acc} = {wrap(dtype, f'r{acc} + choose(here, {value}, 0)')}")
            if not exclusive:
                lines.append(f"{acc} = r{acc}")
        self.body.memo[node] = (acc, inner)

    def stores(self, index: int, node: Node, block: bool) -> None:
        shape = self.nest.shape
        for store in self.plan.stores[index]:
            if store.use.node is not node:
                continue
            address, stride, _ = self.array_of_store(store.buffer)
            st = f"st{WIDTH[node.aval.dtype]}"
            value, level = self.body.memo[node]
            if node.prim == "reduce":
                line = (
                    f"{st}({address}, 0, {value}, True)"
                    if block
                    else (f"{st}({address}, i, {value}, on)" if len(shape) == 2 else "")
                )
                self.body.after[level].append(line)
                continue
            place = ("0", "i", f"i * {stride} + j")[len(shape)]
            if node.prim == "cumsum" and node.param("mode") == "offsets":
                outer = 1 if self.nest.n is not None else 0
                self.body.lines[outer].append(f"{st}({address}, 0, 0, True)")
                place = "i + 1"
            row = not block and loop_kind(self.nest) == "scan"
            mask = "here" if row else "on"
            inner = 1 + len(shape)
            self.body.lines[inner].append(f"{st}({address}, {place}, {value}, {mask})")

    # -- pads

    def fill(self, fill: Fill) -> list[str]:
        """The pad, from the actual to the padded extent."""
        buffer = fill.buffer
        address, stride, _ = self.array_of_store(buffer)
        value, shape, lines = self.pad_value(fill), buffer.aval.shape, self.body.lines
        actual = [self.extent(dim)[0] for dim in shape]
        padded = [self.padded(dim) for dim in shape]
        st = f"st{WIDTH[buffer.aval.dtype]}"
        rows = f"({padded[0]} - {actual[0]})"
        if len(shape) == 1:
            inner = [f"{st}({address}, {actual[0]} + i, {value}, on)"]
            return [*lines[0], *self.over(buffer.n, [rows], lines[1], inner)]
        if isinstance(shape[1], Dim):  # also behind the rows that are used
            outside = f"(j >= {actual[1]})"
            if isinstance(shape[0], Dim):
                outside = f"((i >= {actual[0]}) | {outside})"
            inner = [f"{st}({address}, i * {stride} + j, {value}, on & {outside})"]
            return [*lines[0], *self.over(buffer.n, padded, lines[1], inner)]
        widths = shape[1].values if isinstance(shape[1], Sizes) else (shape[1],)
        inside = f"on & (j < {actual[1]})"
        inner = [f"{st}({address}, ({actual[0]} + i) * {stride} + j, {value}, {inside})"]
        return [*lines[0], *self.over(buffer.n, [rows, str(max(widths))], lines[1], inner)]

    # -- nodes with loops of their own

    def opaque(self, node: Node) -> list[str]:
        if node.prim == "custom_call":
            call = self.kernel_call(node, TARGET)
            return [call.replace("(", "(block, blocks, ", 1)]
        if node.prim == "scatter":
            return self.scatter(node)
        (op,) = node.operands
        assert isinstance(op, Use)
        source, _, _ = self.array(op)
        out, _, _ = self.array_of_store(self.plan.home[node, 0])
        size, _ = self.extent(node.aval.shape[0])
        count, _ = self.extent(op.aval.shape[0], self.members(op))
        lines = self.body.lines
        if node.prim == "segment_ids":
            load = f"ld{WIDTH[op.aval.dtype]}"
            arguments = f"{source}, imax({count} - 1, 0), {out}, {size}, block, blocks, {load}"
            line = f"segment_ids({arguments})"
            if node.n is None:
                return [*lines[0], *lines[1], line]
            return [
                *lines[0],
                f"for g in range(0, {self.count(node.n)}):",
                *_indent([*lines[1], line]),
            ]
        line = f"compact({source}, {size}, {out}, {node.param('fill')})"
        if node.n is None:
            return ["if block == 0:", *_indent([*lines[0], *lines[1], line])]
        loop = f"for g in range(block, {self.count(node.n)}, blocks):"
        return [*lines[0], loop, *_indent([*lines[1], line])]

    def scatter(self, node: Node) -> list[str]:
        """In order, one update at a time: the last one must win."""
        state, update, *indices = node.operands
        assert isinstance(state, Use)
        shape = next((op.aval.shape for op in node.operands[1:] if isinstance(op, Use)), ())
        address, stride, _ = self.array(state)
        value = self.scalar(update)[0]
        places = [self.scalar(op)[0] for op in indices]
        sizes = [self.extent(dim, self.members(state))[0] for dim in state.aval.shape]
        guards = [self.dialect.inside(p, s) for p, s in zip(places, sizes, strict=True)]
        place, guard = self.place(places, stride), self.dialect.both(guards)
        st = f"st{WIDTH[state.aval.dtype]}({address}, {place}, {value}, {guard})"
        lines = self.body.lines
        # The next update may go to the same element, by another thread.
        loop = [st, "tl.debug_barrier()"]
        if not shape:
            loop = [*lines[2], *lines[3], *loop]
        for axis in reversed(range(len(shape))):
            stop = self.extent(shape[axis])[0]
            head = f"for {LOOPS[2 + axis]} in range(0, {stop}):"
            loop = [head, *_indent([*lines[2 + axis], *loop])]
        total = self.count(node.n) if node.n is not None else "1"
        return [*lines[0], f"for g in range(block, {total}, blocks):", *_indent([*lines[1], *loop])]


def _indent(lines: Sequence[Any]) -> list[str]:
    return ["    " + line for line in lines] or ["    pass"]
