"""The CUDA C++ target's source. It needs no header, so NVRTC compiles it as it stands."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from stepgraph.pipeline.passes.buffers import Plan
from stepgraph.pipeline.passes.levels import levels

from .simt import THREADS, For, If, Simt, SimtDialect
from .source import Source

TARGET = "cuda"


def generate(plan: Plan) -> Source:
    """The text of the compiled step for `plan`: the kernel `stepgraph_step(ctx, first, last)`."""
    source = Simt(plan, levels(plan), CudaC(), TARGET).run()
    parts = [resource("stepgraph.pipeline.lower", "device.cuh")]
    files = dict.fromkeys(where.split(":")[0] for where in source.kernels.values())
    parts += [resource(*file.rsplit("/", 1)) for file in files]
    source.text = "\n".join([*parts, source.text])
    return source


def resource(package: str, name: str) -> str:
    """The text of a CUDA C++ file that is shipped in a package."""
    return resources.files(package).joinpath(name).read_text()


class CudaC(SimtDialect):
    """C++; all scalars are `i64`."""

    def literal(self, value: int) -> str:
        if value == -(2**63):
            return "(-9223372036854775807LL - 1)"
        return f"{value}LL" if abs(value) > 2**31 - 1 else str(value)

    def choose(self, condition: str, a: str, b: str) -> str:
        return f"(({condition}) ? i64({a}) : i64({b}))"

    def inside(self, index: str, size: str) -> str:
        return f"(0 <= {index} && {index} < {size})"

    def both(self, conditions: Sequence[str]) -> str:
        return " && ".join(conditions)

    def either(self, conditions: Sequence[str]) -> str:
        return " || ".join(conditions)

    def wide(self, op: str, a: str, b: str) -> str:
        # Unsigned arithmetic wraps; signed overflow is undefined.
        return f"i64(u64({a}) {op} u64({b}))"

    def let(self, name: str, text: str) -> str:
        return f"const i64 {name} = {text};"

    def var(self, name: str, text: str) -> str:
        return f"i64 {name} = {text};"

    def assign(self, name: str, text: str) -> str:
        return f"{name} = {text};"

    def call(self, text: str) -> str:
        return f"{text};"

    def comment(self, text: str) -> str:
        # A backslash at the end would swallow the next line.
        return "// " + text.replace("\\", "/")

    def scope(self, body: list[Any]) -> list[Any]:
        return [If("", body)]

    def thread_names(self) -> list[Any]:
        return [
            self.let("lane", "threadIdx.x"),
            self.let("width", "blockDim.x"),
            self.let("block", "blockIdx.x"),
            self.let("blocks", "gridDim.x"),
            self.let("thread", "block * width + lane"),
            self.let("threads", "blocks * width"),
        ]

    def kernel(self, body: list[Any], shared_words: int) -> str:
        head = (
            f'extern "C" __global__ void __launch_bounds__({THREADS}, 1)\n'
            "stepgraph_step(i64 ctx, int first, int last) {\n"
            f"    __shared__ i64 shared[{shared_words}];\n"
        )
        return head + "\n".join(_print(body, 1)) + "\n}\n"


def _print(body: list[Any], depth: int) -> list[str]:
    indent, lines = "    " * depth, []
    for s in body:
        if isinstance(s, str):
            lines.append(indent + s)
            continue
        if isinstance(s, For):
            head = f"for (i64 {s.var} = {s.start}; {s.var} < {s.stop}; {s.var} += {s.step})"
        else:
            head = f"if ({s.condition})" if s.condition else ""
        lines += [f"{indent}{head} {{".replace("  {", " {") if head else indent + "{"]
        lines += [*_print(s.body, depth + 1), indent + "}"]
    return lines
