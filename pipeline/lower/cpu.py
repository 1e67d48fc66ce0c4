"""The CPU target's source: a buffer plan as one Python function for Numba."""

from __future__ import annotations

from typing import Any

from stepgraph.pipeline.ir import Dim, Node, Use
from stepgraph.pipeline.passes.buffers import Fill, Plan
from stepgraph.pipeline.passes.fusion import Nest
from stepgraph.pipeline.primitives import PRIMITIVES, identity

from .emitter import LOOPS, Body, Emitter
from .scalar import WIDTH, Dialect, wrap
from .source import Padded, Source


def generate(plan: Plan) -> Source:
    """The text of the compiled step for `plan`: `step(ctx)`."""
    return _Generator(plan).run()


class _Generator(Emitter):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, Dialect())
        self.constants: dict[Any, str] = {}  # addresses and strides that hold for the whole step

    def run(self) -> Source:
        lines = []
        for i, nest in enumerate(self.plan.schedule.nests):
            lines += ["", f"# nest {i}: {nest}", *self._emit_nest(i, nest)]
        head = ["staging = ld8(ctx, 0)"]
        for k, dim in enumerate(self.graph.dims):
            head.append(f"pad_{dim} = {self.slot(Padded(dim))}")
            head.append(f"len_{dim} = imin(imax(ld8(staging, {k}), 0), pad_{dim})")
        text = "\n".join(["def step(ctx):", *("    " + t if t else "" for t in [*head, *lines])])
        return Source(text + "\n", list(self.slots), self.kernels)

    def once(self, key: Any, level: int, prefix: str, text: str) -> str:
        """What the context says is read once a step."""
        if level == 0 and key[0] in ("table", "address", "stride", "ints"):
            if key not in self.constants:
                self.constants[key] = self.name(prefix)
                self.body.lines[0].append(self.let(self.constants[key], text))
            return self.constants[key]
        return super().once(key, level, prefix, text)

    # -- nests

    def _emit_nest(self, index: int, nest: Nest) -> list[str]:
        self.body, self.nest = Body(), nest
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
                self.body, self.nest = Body(), Nest(fill.buffer.n, ())
                self._fill(fill, 1)
                lines += self._loops(self.nest)
        return lines

    def _loops(self, nest: Nest) -> list[str]:
        body = self.body
        heads = ["", "", "", ""]
        if nest.n is not None:
            heads[1] = f"for g in range({self.count(nest.n)}):"
        for axis, dim in enumerate(nest.shape if not nest.opaque else ()):
            heads[2 + axis] = f"for {LOOPS[2 + axis]} in range({self.extent(dim)[0]}):"
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
        here = [(LOOPS[2 + axis], 2 + axis) for axis in range(len(self.nest.shape))]
        text, level = self.expression(node, tuple(range(self.nest.n or 1)), here)
        if text.isidentifier() and self.nest.shape:
            name = text  # another name for a scalar of this nest
        else:
            self.body.lines[level].append(f"{name} = {text}")
        self.body.memo[node] = (name, level)

    def _scan(self, node: Node) -> None:
        inner = 1 + len(self.nest.shape)
        outer = inner - 1 if (inner > 2 or self.nest.n is not None) else 0
        acc = f"v{self.number[node]}"
        value, _ = self.scalar(node.operands[0])
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
            address, stride, _ = self.array_of_store(store.buffer)
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

    def _fill(self, fill: Fill, level: int) -> None:
        """The pad, from the actual to the padded extent, after the member's loops."""
        buffer, after = fill.buffer, self.body.after[level]
        address, stride, _ = self.array_of_store(buffer)
        value = self.pad_value(fill)
        fn, shape = f"fill{WIDTH[buffer.aval.dtype]}", buffer.aval.shape
        actual = [self.extent(dim)[0] for dim in shape]
        padded = [self.padded(dim) for dim in shape]
        if len(shape) == 1:
            after.append(f"{fn}({address}, {actual[0]}, {padded[0]}, {value})")
            return
        row = self.name("row")
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

    # -- nodes with loops of their own

    def _opaque(self, node: Node) -> None:
        if node.prim == "custom_call":
            self.body.lines[0].append(self.kernel_call(node, "cpu"))
        elif node.prim == "scatter":
            self._scatter(node)
        else:
            (op,) = node.operands
            assert isinstance(op, Use)
            source, _, _ = self.array(op)
            out, _, _ = self.array_of_store(self.plan.home[node, 0])
            size, _ = self.extent(node.aval.shape[0])
            count, _ = self.extent(op.aval.shape[0], self.members(op))
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
        address, stride, _ = self.array(state)
        value = self.scalar(update)[0]
        places = [self.scalar(op)[0] for op in indices]
        sizes = [self.extent(dim, self.members(state))[0] for dim in state.aval.shape]
        guard = " and ".join(f"0 <= {p} < {s}" for p, s in zip(places, sizes, strict=True))
        place = places[0] if len(places) == 1 else f"{places[0]} * {stride} + {places[1]}"
        inner = 1 + len(shape)
        self.body.lines[inner] += [
            f"if {guard}:",
            f"    st{WIDTH[state.aval.dtype]}({address}, {place}, {value})",
        ]
        self.nest = Nest(node.n, shape)
