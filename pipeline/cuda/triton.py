"""Kernels by Triton."""

from __future__ import annotations

import importlib
import linecache
from typing import Any

from stepgraph.pipeline.errors import CompileError
from stepgraph.pipeline.lower.source import Source

OPTIONS = {"num_warps": 4, "maxnreg": 128}


def require() -> None:
    """Raises ImportError if Triton is not there."""
    import triton  # noqa: F401


def function(source: Source) -> Any:
    """The text as a Triton kernel, with what it calls."""
    import hashlib

    from stepgraph.pipeline.lower import triton_memory as memory

    scope: dict[str, Any] = {k: v for k, v in vars(memory).items() if not k.startswith("__")}
    for name, where in source.kernels.items():
        module, _, attribute = where.partition(":")
        scope[name] = getattr(importlib.import_module(module), attribute)
    # Triton asks for a function's source: it finds that of a file which exists only here.
    name = f"<stepgraph step {hashlib.sha256(source.text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source.text), None, source.text.splitlines(True), name)
    scope["__name__"] = __name__
    exec(compile(source.text, name, "exec"), scope)
    return scope["stepgraph_step"]


def load(source: Source) -> Any:
    """The kernel, compiled for the current device. Raises CompileError if Triton refuses it."""
    import triton

    try:
        kernel = function(source)
        kernel.warmup(0, 0, 0, grid=(1,), **OPTIONS)
    except Exception as err:
        raise CompileError(f"Triton {triton.__version__} failed on the step: {err}") from err
    return kernel


def launch(
    kernel: Any, context: int, first: int, last: int, blocks: int, threads: int, stream: int
) -> None:
    """Enqueue on torch's current stream, which `stream` is."""
    kernel[(blocks,)](context, first, last, **OPTIONS)
