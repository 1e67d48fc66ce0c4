"""Device targets that can run on this machine without a GPU, and why the others cannot."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.device.host_device import HostCuda, has_compiler


@dataclass(frozen=True)
class Stand:
    """A target and what runs it. missing: why it cannot ("" if it can). switch: the environment
    variable that its simulator wants. slow: a launch takes a good part of a second."""

    target: str
    device: Callable[[], Any]
    missing: str
    switch: str = ""
    slow: bool = False


def _simulator() -> Any:
    from tests.device.numba_simulator import NumbaSimulator

    return NumbaSimulator()


def _interpreter() -> Any:
    from tests.device.triton_interpreter import TritonInterpreter

    return TritonInterpreter()


def _switched(package: str, variable: str) -> str:
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return "" if os.environ.get(variable) == "1" else f"set {variable}=1 to run it"


STANDS = {
    "cuda by g++": Stand("cuda", HostCuda, "" if has_compiler() else "there is no g++"),
    "numba-cuda simulator": Stand(
        "numba-cuda",
        _simulator,
        _switched("numba_cuda", "NUMBA_ENABLE_CUDASIM"),
        "NUMBA_ENABLE_CUDASIM",
        slow=True,
    ),
    "triton interpreter": Stand(
        "triton", _interpreter, _switched("triton", "TRITON_INTERPRET"), "TRITON_INTERPRET"
    ),
}
