"""A small compiled step under test: every call also equals the oracle, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import stepgraph as sg


class Under:
    """`step(B=..., ..., name=array)` runs the compiled step; outputs as lists.

    bound: device and state inputs, {name: array} or {name: {group: array}}.
    """

    def __init__(
        self,
        step: Callable[[sg.Step], None],
        groups: Iterable[sg.Group] = (),
        *,
        capacity: Mapping[str, int],
        bound: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.graph = sg.trace(step, groups)
        self.compiled = sg.compile(self.graph, capacity, **options)
        self.bound = dict(bound or {})
        for name, arrays in self.bound.items():
            self.compiled.bind(name, arrays)

    def __call__(self, **args: Any) -> dict[Any, Any]:
        extents = {dim: args[dim] for dim in self.graph.dims}
        given = {k: v for k, v in args.items() if k not in extents}
        typed = {k: np.asarray(v, self.compiled.inputs[k].dtype) for k, v in given.items()}
        want = sg.evaluate(
            self.graph, {**typed, **self.bound}, extents, self.compiled.bucket(**extents)
        )
        out = self.compiled(**extents, **typed)
        for key, array in out.items():
            np.testing.assert_array_equal(array, want[key], err_msg=str(key))
            assert array.dtype == want[key].dtype
        return {key: array.tolist() for key, array in out.items()}


def rows_of(tables: Mapping[str, Any], max_blocks: int) -> dict[str, np.ndarray]:
    """{group: block table} from lists of block ids, filled up with the null block."""
    return {
        name: np.array([row + [0] * (max_blocks - len(row)) for row in rows], np.int32)
        for name, rows in tables.items()
    }
