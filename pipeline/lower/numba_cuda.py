"""The Numba-CUDA target's source: the SIMT kernel as Python text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepgraph.pipeline.passes.buffers import Plan
from stepgraph.pipeline.passes.levels import levels

from .simt import For, If, Simt, SimtDialect
from .source import Source

TARGET = "numba-cuda"


def generate(plan: Plan) -> Source:
    """The text of the compiled step for `plan`: the function `stepgraph_step(ctx, first, last)`."""
    return Simt(plan, levels(plan), NumbaCuda(), TARGET).run()


class NumbaCuda(SimtDialect):
    """Python; all scalars are int64."""

    def wide(self, op: str, a: str, b: str) -> str:
        # A function, since the simulator's integers do not wrap around by themselves.
        return f"{ {'+': 'add64', '-': 'sub64', '*': 'mul64'}[op] }({a}, {b})"

    def choose(self, condition: str, a: str, b: str) -> str:
        return f"({a} if {condition} else {b})"

    def either(self, conditions: Sequence[str]) -> str:
        return " or ".join(conditions)

    def let(self, name: str, text: str) -> str:
        return f"{name} = {text}"

    var = assign = let

    def call(self, text: str) -> str:
        return text

    def comment(self, text: str) -> str:
        return f"# {text}"

    def scope(self, body: list[Any]) -> list[Any]:
        return body

    def thread_names(self) -> list[Any]:
        return [
            self.let("lane", "i64(cuda.threadIdx.x)"),
            self.let("width", "i64(cuda.blockDim.x)"),
            self.let("block", "i64(cuda.blockIdx.x)"),
            self.let("blocks", "i64(cuda.gridDim.x)"),
            self.let("thread", "block * width + lane"),
            self.let("threads", "blocks * width"),
        ]

    def kernel(self, body: list[Any], shared_words: int) -> str:
        head = [
            "def stepgraph_step(ctx, first, last):",
            f"    shared = cuda.shared.array({shared_words}, int64)",
        ]
        return "\n".join([*head, *_print(body, 1)]) + "\n"


def _print(body: list[Any], depth: int) -> list[str]:
    indent, lines = "    " * depth, []
    for s in body:
        if isinstance(s, str):
            lines.append(indent + s)
            continue
        if isinstance(s, For):
            lines.append(f"{indent}for {s.var} in range({s.start}, {s.stop}, {s.step}):")
        else:
            assert isinstance(s, If)
            lines.append(f"{indent}if {s.condition}:")
        inside = _print(s.body, depth + 1)
        lines += inside or [indent + "    pass"]
    return lines
