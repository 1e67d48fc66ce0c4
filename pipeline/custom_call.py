"""`Kernel`: a hand-written operation that a graph reaches by the primitive `custom_call`.

A general compiler does ragged in-place updates badly, so they are kernels. A kernel has one meaning
(`reference`, NumPy, one group at a time) and one implementation per target; each handles all groups
in one call, through pointer tables.

Call convention on the CPU target, every argument an int64:

    fn(n, *extents, *arrays, attrs)

`n` groups; the actual extents that `extents` lists; for each operand, then each
result, the address of a table int64[n][2] = (data address, row stride in elements); the address of
int64[n][len(attrs)], the static integers of each group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import CompileError
from .ir import Aval, Extent


@dataclass(frozen=True)
class Kernel:
    """A hand-written operation.

    rule: (operand avals, params) -> result avals; raises TypeError with a clear text.
    reference: (*operands, **params) -> result or tuple of results, NumPy arrays of one group.
    extents: (operand avals) -> the extents passed, shared by all groups, e.g. (Dim("B"),).
    attrs: (operand avals, params) -> static integers of one group. Sizes that differ between groups
        (table widths) come from here.
    targets: target -> "module:function" of its implementation, imported when the target compiles.
    in_place: result index -> operand index that it overwrites (donation).
    """

    name: str
    rule: Callable[[Sequence[Aval], dict[str, Any]], tuple[Aval, ...]]
    reference: Callable[..., Any]
    extents: Callable[[Sequence[Aval]], tuple[Extent, ...]]
    attrs: Callable[[Sequence[Aval], dict[str, Any]], tuple[int, ...]]
    targets: Mapping[str, str]
    in_place: tuple[tuple[int, int], ...] = ()

    def run_reference(self, args: Sequence[np.ndarray], params: dict[str, Any]) -> tuple[Any, ...]:
        out = self.reference(*args, **params)
        return out if isinstance(out, tuple) else (out,)

    def target(self, name: str) -> str:
        """The implementation for a target. Raises CompileError if the kernel has none."""
        if name not in self.targets:
            raise CompileError(f"kernel {self.name!r} has no implementation for {name!r}")
        return self.targets[name]

    def __hash__(self) -> int:
        return hash(self.name)
