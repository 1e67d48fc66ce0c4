"""Sources for devices that run one scalar program in many threads: CUDA C++ and Numba-CUDA.

The text is one kernel, `step(ctx, first, last)`, that runs the levels first..last of the plan
(passes/levels.py). A launch of one block runs many levels with barriers between them; a level with
much work is launched alone over many blocks. Every loop strides over all threads, so any grid is
right:

* elementwise nests: one thread per element of all members;
* scans and reductions of one dim: one block per member, in chunks of a block, with a carry;
* scans and reductions along rows: one thread per row;
* scatters: one thread per member, since the last of several updates must win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.pipeline.ir import Dim, Extent, Node, Sizes, Use
from stepgraph.pipeline.passes.buffers import Fill, Plan
from stepgraph.pipeline.passes.levels import Item
from stepgraph.pipeline.primitives import PRIMITIVES, identity

from .emitter import LOOPS, Body, Emitter, loop_kind
from .scalar import WIDTH, Dialect, wrap
from .source import Padded, Source

THREADS = 512  # a block; the scan scratch is sized for it
SCAN_WORDS = 2 * THREADS + 1
SEGMENTS = 4096  # offsets that segment_ids keeps in shared memory


@dataclass
class For:
    """`for var in range(start, stop, step)`."""

    var: str
    start: str
    stop: str
    step: str
    body: list[Any]


@dataclass
class If:
    condition: str
    body: list[Any]


class Simt(Emitter):
    """The generator; the dialect prints its statements."""

    dialect: SimtDialect

    def __init__(self, plan: Plan, levels: list[list[Item]], dialect: SimtDialect, target: str):
        super().__init__(plan, dialect)
        self.levels, self.target = levels, target

    def let(self, name: str, text: str) -> str:
        return self.dialect.let(name, text)

    def run(self) -> Source:
        d = self.dialect
        body: list[Any] = [d.let("staging", self.slot_of_staging())]
        for k, dim in enumerate(self.graph.dims):
            body.append(d.let(f"pad_{dim}", self.slot(Padded(dim))))
            actual = f"imin(imax(ld8(staging, {k}), 0), pad_{dim})"
            body.append(d.let(f"len_{dim}", actual))
        body += d.thread_names()
        for number, level in enumerate(self.levels):
            inner: list[Any] = []
            for item in level:
                inner += [d.comment(str(item)), *d.scope(self.item(item))]
            inner.append(d.call("barrier()"))
            body.append(If(d.both([f"first <= {number}", f"{number} <= last"]), inner))
        segments = any(n.prim == "segment_ids" for n in self.graph.nodes)
        words = SCAN_WORDS + (SEGMENTS if segments else 0)
        text = d.kernel(body, words)
        return Source(text, list(self.slots), self.kernels, self.levels)

    def slot_of_staging(self) -> str:
        return "ld8(ctx, 0)"

    # -- items

    def item(self, item: Item) -> list[Any]:
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
        if block:
            return self.by_block()
        return self.by_row() if kind == "scan" else self.by_element()

    def by_element(self) -> list[Any]:
        """One thread per element."""
        lines = self.body.lines
        inner = [*lines[2], *lines[3]]
        loop = self.flat(self.nest.n, self.nest.shape, lines[1], inner)
        return [*lines[0], loop]

    def by_row(self) -> list[Any]:
        """One thread per row; the last dim in order."""
        lines, after = self.body.lines, self.body.after
        stop = self.extent(self.nest.shape[1])[0]
        inner = [*lines[2], For("j", "0", stop, "1", lines[3] + after[3]), *after[2]]
        loop = self.flat(self.nest.n, self.nest.shape[:1], lines[1], inner)
        return [*lines[0], loop]

    def by_block(self) -> list[Any]:
        """One block per member. A thread past the end repeats the last element and neither stores
        nor counts (`on`)."""
        d, lines, after = self.dialect, self.body.lines, self.body.after
        size = self.extent(self.nest.shape[0])[0]
        chunk = [
            d.let("i", f"imin(base + lane, {size} - 1)"),
            d.let("on", d.choose(f"base + lane < {size}", "1", "0")),
            *lines[2],
        ]
        loop = [*lines[1], For("base", "0", size, "width", chunk), *after[1]]
        if self.nest.n is None:
            return [If("block == 0", [*lines[0], *loop, *after[0]])]
        return [*lines[0], For("g", "block", self.count(self.nest.n), "blocks", loop)]

    def flat(
        self, n: int | None, shape: Sequence[Extent], member: list[Any], inner: list[Any]
    ) -> Any:
        """Threads over members times shape; `member` lines may use g, `inner` ones also i and j."""
        d = self.dialect
        sizes = [str(max(x.values)) if isinstance(x, Sizes) else self.symbol(x) for x in shape]
        each = " * ".join(sizes) or "1"
        head: list[Any] = []
        rest = "k"
        if n is not None and shape:
            head = [d.let("g", f"div32(k, {each})"), d.let("e", f"k - g * ({each})")]
            rest = "e"
        elif n is not None:
            head = [d.let("g", "k")]
        if len(sizes) == 2:
            head += [
                d.let("i", f"div32({rest}, {sizes[1]})"),
                d.let("j", f"{rest} - i * {sizes[1]}"),
            ]
        elif sizes:
            head.append(d.let("i", rest))
        guards = [
            f"{LOOPS[2 + axis]} < {self.extent(dim)[0]}"
            for axis, dim in enumerate(shape)
            if isinstance(dim, Sizes)
        ]
        if guards:
            inner = [If(d.both(guards), inner)]
        total = f"{self.count(n)} * {each}" if n is not None else each
        return For("k", "thread", total, "threads", [*head, *member, *inner])

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
        d, op, dtype = self.dialect, node.param("op"), node.aval.dtype
        outer, inner = (1 if self.nest.n is not None else 0, 2) if block else (2, 3)
        acc = f"v{self.number[node]}"
        value, _ = self.scalar(node.operands[0])
        self.body.lines[outer].append(d.var(acc, d.literal(identity(op, dtype))))
        joined = f"{acc} + {value}" if dtype == "int32" else d.wide("+", acc, value)
        step = wrap(dtype, joined) if op == "sum" else f"i{op}({acc}, {value})"
        if block:
            self.body.lines[inner].append(If("on != 0", [d.assign(acc, step)]))
            total = f"reduce_{op}({acc}, shared)"
            self.body.after[outer].append(
                d.assign(acc, wrap(dtype, total) if op == "sum" else total)
            )
        else:
            self.body.lines[inner].append(d.assign(acc, step))
        self.body.memo[node] = (acc, outer)

    def scan(self, node: Node, block: bool) -> None:
        d, dtype, acc = self.dialect, node.aval.dtype, f"v{self.number[node]}"
        outer, inner = (1 if self.nest.n is not None else 0, 2) if block else (2, 3)
        value, _ = self.scalar(node.operands[0])
        before, after = self.body.lines[outer], self.body.lines[inner]
        exclusive = node.param("mode") == "exclusive"

        def plus(a: str, b: str) -> str:
            return wrap(dtype, f"{a} + {b}") if dtype == "int32" else d.wide("+", a, b)

        before.append(d.var(f"r{acc}", "0"))
        if block:
            mine = d.choose("on != 0", value, "0")
            after.append(d.let(f"s{acc}", f"scan_sum({mine}, shared)"))
            after.append(d.let(f"t{acc}", plus(f"r{acc}", f"s{acc}")))
            less = f"t{acc} - {value}" if dtype == "int32" else d.wide("-", f"t{acc}", value)
            after.append(d.let(acc, wrap(dtype, less) if exclusive else f"t{acc}"))
            after.append(d.assign(f"r{acc}", plus(f"r{acc}", "scan_total(shared)")))
        else:
            if exclusive:
                after.append(d.let(acc, f"r{acc}"))
            after.append(d.assign(f"r{acc}", plus(f"r{acc}", value)))
            if not exclusive:
                after.append(d.let(acc, f"r{acc}"))
        self.body.memo[node] = (acc, inner)

    def stores(self, index: int, node: Node, block: bool) -> None:
        d, shape = self.dialect, self.nest.shape
        for store in self.plan.stores[index]:
            if store.use.node is not node:
                continue
            address, stride, _ = self.array_of_store(store.buffer)
            st = f"st{WIDTH[node.aval.dtype]}"
            value, level = self.body.memo[node]
            if node.prim == "reduce":
                place = "i" if len(shape) == 2 else "0"
                line: Any = d.call(f"{st}({address}, {place}, {value})")
                self.body.after[level].append(If("lane == 0", [line]) if block else line)
                continue
            place = ("0", "i", f"i * {stride} + j")[len(shape)]
            if node.prim == "cumsum" and node.param("mode") == "offsets":
                first = d.call(f"{st}({address}, 0, 0)")
                outer = 1 if self.nest.n is not None else 0
                self.body.lines[outer].append(If("lane == 0", [first]))
                place = "i + 1"
            line = d.call(f"{st}({address}, {place}, {value})")
            inner = 1 + len(shape)
            self.body.lines[inner].append(If("on != 0", [line]) if block else line)

    # -- pads

    def fill(self, fill: Fill) -> list[Any]:
        """The pad, from the actual to the padded extent."""
        d, buffer = self.dialect, fill.buffer
        address, stride, _ = self.array_of_store(buffer)
        value, shape, lines = self.pad_value(fill), buffer.aval.shape, self.body.lines
        actual = [self.extent(dim)[0] for dim in shape]
        padded = [self.padded(dim) for dim in shape]
        st = f"st{WIDTH[buffer.aval.dtype]}"
        rows = f"({padded[0]} - {actual[0]})"
        if len(shape) == 1:
            inner: list[Any] = [d.call(f"{st}({address}, {actual[0]} + i, {value})")]
            return [*lines[0], self.span(buffer.n, rows, None, lines[1], inner)]
        if isinstance(shape[1], Dim):  # also behind the rows that are used
            outside = f"i >= {actual[0]}" if isinstance(shape[0], Dim) else "0 != 0"
            unused = d.either([outside, f"j >= {actual[1]}"])
            inner = [If(unused, [d.call(f"{st}({address}, i * {stride} + j, {value})")])]
            return [*lines[0], self.span(buffer.n, padded[0], padded[1], lines[1], inner)]
        width = shape[1]
        line = d.call(f"{st}({address}, ({actual[0]} + i) * {stride} + j, {value})")
        if isinstance(width, Sizes):
            inner = [If(f"j < {self.extent(width)[0]}", [line])]
            return [*lines[0], self.span(buffer.n, rows, str(max(width.values)), lines[1], inner)]
        return [*lines[0], self.span(buffer.n, rows, str(width), lines[1], [line])]

    def span(
        self, n: int | None, rows: str, columns: str | None, member: list[Any], inner: list[Any]
    ) -> Any:
        """Like `flat`, for extents given as text."""
        d = self.dialect
        each = rows if columns is None else f"{rows} * {columns}"
        head: list[Any] = []
        rest = "k"
        if n is not None:
            head, rest = [d.let("g", f"div32(k, {each})"), d.let("e", f"k - g * ({each})")], "e"
        if columns is None:
            head.append(d.let("i", rest))
        else:
            head += [d.let("i", f"div32({rest}, {columns})"), d.let("j", f"{rest} - i * {columns}")]
        total = f"{self.count(n)} * {each}" if n is not None else each
        return For("k", "thread", total, "threads", [*head, *member, *inner])

    # -- nodes with loops of their own

    def opaque(self, node: Node) -> list[Any]:
        d = self.dialect
        if node.prim == "custom_call":
            return [d.call(self.kernel_call(node, self.target))]
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
            wide = int(op.aval.dtype == "int64")
            ends = f"imax({count} - 1, 0)"
            line = d.call(f"segment_ids({source}, {wide}, {ends}, {out}, {size}, shared)")
            if node.n is None:
                return [*lines[0], *lines[1], line]
            return [*lines[0], For("g", "0", self.count(node.n), "1", [*lines[1], line])]
        fill = d.literal(node.param("fill"))
        line = d.call(f"compact({source}, {size}, {out}, {fill}, shared)")
        if node.n is None:
            return [If("block == 0", [*lines[0], *lines[1], line])]
        return [*lines[0], For("g", "block", self.count(node.n), "blocks", [*lines[1], line])]

    def scatter(self, node: Node) -> list[Any]:
        d = self.dialect
        state, update, *indices = node.operands
        assert isinstance(state, Use)
        shape = next((op.aval.shape for op in node.operands[1:] if isinstance(op, Use)), ())
        address, stride, _ = self.array(state)
        value = self.scalar(update)[0]
        places = [self.scalar(op)[0] for op in indices]
        sizes = [self.extent(dim, self.members(state))[0] for dim in state.aval.shape]
        guards = [d.inside(p, s) for p, s in zip(places, sizes, strict=True)]
        st = d.call(
            f"st{WIDTH[state.aval.dtype]}({address}, {self.place(places, stride)}, {value})"
        )
        lines = self.body.lines
        loop: list[Any] = [If(d.both(guards), [st])]
        for axis in reversed(range(len(shape))):
            stop = self.extent(shape[axis])[0]
            loop = [For(LOOPS[2 + axis], "0", stop, "1", [*lines[2 + axis], *loop])]
        if not shape:
            loop = [*lines[2], *lines[3], *loop]
        total = self.count(node.n) if node.n is not None else "1"
        return [*lines[0], For("g", "thread", total, "threads", [*lines[1], *loop])]


class SimtDialect(Dialect):
    """Statements of a device language, on top of its expressions."""

    def let(self, name: str, text: str) -> str:
        raise NotImplementedError

    def var(self, name: str, text: str) -> str:
        raise NotImplementedError

    def assign(self, name: str, text: str) -> str:
        raise NotImplementedError

    def call(self, text: str) -> str:
        raise NotImplementedError

    def comment(self, text: str) -> str:
        raise NotImplementedError

    def scope(self, body: list[Any]) -> list[Any]:
        """A body whose names may come again in the next one."""
        raise NotImplementedError

    def either(self, conditions: Sequence[str]) -> str:
        raise NotImplementedError

    def thread_names(self) -> list[Any]:
        """lane, width, block, blocks, thread, threads."""
        raise NotImplementedError

    def kernel(self, body: list[Any], shared_words: int) -> str:
        """The whole text. shared_words: int64 words of shared memory."""
        raise NotImplementedError
