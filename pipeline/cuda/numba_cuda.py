"""Kernels by Numba-CUDA."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from stepgraph.pipeline.errors import CompileError
from stepgraph.pipeline.lower.source import Source


def require() -> None:
    """Raises ImportError if numba-cuda is not there."""
    from numba import cuda

    if not hasattr(cuda, "shared"):
        raise ImportError("numba.cuda is not usable")


def function(source: Source) -> Any:
    """The text as a Python function, with what it calls."""
    from numba import cuda

    from stepgraph.pipeline.lower import numba_cuda_memory as memory

    scope: dict[str, Any] = {k: v for k, v in vars(memory).items() if not k.startswith("__")}
    scope["cuda"] = cuda
    for name, where in source.kernels.items():
        module, _, attribute = where.partition(":")
        scope[name] = getattr(importlib.import_module(module), attribute)
    exec(compile(source.text, "<stepgraph step>", "exec"), scope)
    return scope["stepgraph_step"]


def load(source: Source) -> Any:
    """The kernel, compiled now. Raises CompileError if numba-cuda refuses the text or finds no
    compiler."""
    import numba
    from numba import cuda

    try:
        return cuda.jit("void(int64, int32, int32)")(function(source))
    except Exception as err:
        raise CompileError(
            f"numba-cuda (numba {numba.__version__}) failed on the step: {err}. It must fit "
            "the driver's CUDA version: pip install 'stepgraph[cuda12]' or 'stepgraph[cuda13]'"
        ) from err


def launch(
    kernel: Any, context: int, first: int, last: int, blocks: int, threads: int, stream: int
) -> None:
    """Enqueue on a raw stream."""
    from numba import cuda

    queue = cuda.external_stream(stream) if stream else cuda.legacy_default_stream()
    kernel[blocks, threads, queue](np.int64(context), np.int32(first), np.int32(last))
