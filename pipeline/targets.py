"""The table of device targets: who prints the source, and who runs it on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from .errors import CompileError
from .lower.source import Source
from .passes.buffers import Plan


@dataclass(frozen=True)
class Target:
    """generator: module whose `generate(plan)` prints the source. loader: module with `require()`,
    `load(source)`, which gives the kernel, and `launch(kernel, ...)` on a CUDA stream. needs: what
    to install."""

    generator: str
    loader: str
    needs: str

    def generate(self) -> Callable[[Plan], Source]:
        function: Callable[[Plan], Source] = import_module(self.generator).generate
        return function


_LOWER, _CUDA = "stepgraph.pipeline.lower", "stepgraph.pipeline.cuda"
_CUPY = "CuPy: pip install 'stepgraph[cuda13]'"
_NUMBA = "numba-cuda: pip install 'stepgraph[cuda13]'"
_TRITON = "Triton: pip install 'stepgraph[triton]'"
TARGETS: dict[str, Target] = {
    "cuda": Target(f"{_LOWER}.cuda_c", f"{_CUDA}.cupy", _CUPY),
    "numba-cuda": Target(f"{_LOWER}.numba_cuda", f"{_CUDA}.numba_cuda", _NUMBA),
    "triton": Target(f"{_LOWER}.triton_tiles", f"{_CUDA}.triton", _TRITON),
}


def target_of(name: str) -> Target:
    """Raises CompileError for a name that is not there."""
    if name not in TARGETS:
        raise CompileError(f"no target {name!r}; there are {', '.join(['cpu', *TARGETS])}")
    return TARGETS[name]
