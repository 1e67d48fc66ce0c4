"""CUDA C++ by NVRTC, through CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepgraph.pipeline.errors import CompileError
from stepgraph.pipeline.lower.source import Source


def require() -> None:
    """Raises ImportError if CuPy is not there."""
    import cupy  # noqa: F401


def load(source: Source) -> Any:
    """The kernel, compiled for the current device (CuPy keeps the machine code on disk).

    Raises CompileError if NVRTC is missing, does not fit the driver, or refuses the text.
    """
    import cupy

    try:
        module = cupy.RawModule(code=source.text, options=("--std=c++17",))
        return module.get_function("stepgraph_step")
    except Exception as err:
        raise CompileError(
            f"CuPy {cupy.__version__} could not compile the step: {err}. It must be built for the "
            "driver's CUDA version: pip install 'stepgraph[cuda12]' or 'stepgraph[cuda13]'"
        ) from err


def launch(
    kernel: Any, context: int, first: int, last: int, blocks: int, threads: int, stream: int
) -> None:
    """Enqueue on a raw stream."""
    import cupy

    with cupy.cuda.ExternalStream(stream):
        kernel((blocks,), (threads,), (np.int64(context), np.int32(first), np.int32(last)))
