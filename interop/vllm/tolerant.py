"""vLLM and llvmlite in one process.

vLLM on the CPU scans the attributes of all loaded modules at each engine's start; llvmlite's `lib`
object answers to any name, `__dict__` among them, with something that is not a dict, and the scan
fails. A second engine in the process would meet it, so `lib` is made to answer as other objects
do.
"""

from __future__ import annotations

import sys
from typing import Any


def make_llvmlite_scannable() -> None:
    """Idempotent; does nothing while llvmlite is not loaded or has nothing to mend."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    wrapper = getattr(ffi, "_lib_wrapper", None)
    lookup = vars(wrapper).get("__getattr__") if isinstance(wrapper, type) else None
    if lookup is None or getattr(lookup, "scannable", False):
        return

    def __getattr__(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return lookup(self, name)

    __getattr__.scannable = True  # type: ignore[attr-defined]
    wrapper.__getattr__ = __getattr__  # type: ignore[union-attr]
