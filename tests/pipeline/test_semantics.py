"""Integer semantics are defined once: right values by hand, for the oracle and the CPU target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stepgraph as sg

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
LONG_MIN, LONG_MAX = -(2**63), 2**63 - 1


def run(
    fn: Callable[..., Any], *arrays: Any, dtype: str = "int32", padded: int | None = None
) -> np.ndarray:
    """fn over one-dim arrays of extent N; the oracle and the CPU target must agree."""
    n = len(arrays[0])
    padded = n if padded is None else padded

    def step(s: sg.Step) -> None:
        dim = s.dim("N")
        values = [
            s.input(f"x{i}", (dim,), "bool" if np.asarray(a).dtype == bool else dtype)
            for i, a in enumerate(arrays)
        ]
        s.output("out", fn(*values), pad=1)

    graph = sg.trace(step)
    compiled = sg.compile(graph, {"N": max(padded, 1)}, buckets={"N": [max(padded, 1)]})
    inputs = {
        f"x{i}": np.asarray(a, bool if np.asarray(a).dtype == bool else dtype)
        for i, a in enumerate(arrays)
    }
    out = compiled(N=n, **inputs)["out"]
    want = sg.evaluate(graph, inputs, {"N": n}, {"N": max(padded, 1)})["out"]
    assert out.dtype == want.dtype
    np.testing.assert_array_equal(out, want)
    return out


CASES: list[tuple[str, Callable[..., Any], list[Any], str, list[int]]] = [
    ("add wraps", lambda a, b: a + b, [[INT_MAX, INT_MIN], [1, -1]], "int32", [INT_MIN, INT_MAX]),
    ("sub wraps", lambda a, b: a - b, [[INT_MIN], [1]], "int32", [INT_MAX]),
    ("mul wraps", lambda a, b: a * b, [[65536, 3], [65536, -4]], "int32", [0, -12]),
    ("neg wraps", lambda a: -a, [[INT_MIN, 5]], "int32", [INT_MIN, -5]),
    ("long add wraps", lambda a, b: a + b, [[LONG_MAX], [1]], "int64", [LONG_MIN]),
    (
        "floor division",
        lambda a, b: a // b,
        [[7, -7, 7, -7, 6, -6], [2, 2, -2, -2, 3, 3]],
        "int32",
        [3, -4, -4, 3, 2, -2],
    ),
    (
        "the remainder has the divisor's sign",
        lambda a, b: a % b,
        [[7, -7, 7, -7, 6], [2, 2, -2, -2, 3]],
        "int32",
        [1, 1, -1, -1, 0],
    ),
    ("division by zero is 0", lambda a, b: a // b, [[7, 0, -7], [0, 0, 0]], "int32", [0, 0, 0]),
    ("remainder by zero is 0", lambda a, b: a % b, [[7, 0, -7], [0, 0, 0]], "int32", [0, 0, 0]),
    ("min // -1 wraps", lambda a, b: a // b, [[INT_MIN], [-1]], "int32", [INT_MIN]),
    ("min % -1 is 0", lambda a, b: a % b, [[INT_MIN], [-1]], "int32", [0]),
    ("long min // -1", lambda a, b: a // b, [[LONG_MIN], [-1]], "int64", [LONG_MIN]),
    ("by a constant", lambda a: a // 16, [[-1, -16, -17, 15, 16]], "int32", [-1, -1, -2, 0, 1]),
    ("mod a constant", lambda a: a % 16, [[-1, -16, -17, 15, 16]], "int32", [15, 0, 15, 15, 0]),
    ("by -3", lambda a: a // -3, [[7, -7]], "int32", [-3, 2]),
    ("constant over value", lambda a: 100 // a, [[7, -7, 0]], "int32", [14, -15, 0]),
    ("xor and not", lambda a: ~(a ^ 5), [[0, 5, -1]], "int32", [-6, -1, 5]),
    ("cast wraps", lambda a: a.cast("int32"), [[2**31, -(2**31) - 1]], "int64", [INT_MIN, INT_MAX]),
    ("cast to bool", lambda a: a.cast("bool"), [[0, 7, -1]], "int32", [0, 1, 1]),
    ("gather fills", lambda a: sg.gather(a, a, fill=-9), [[2, -1, 3, 0]], "int32", [3, -9, 0, 2]),
    ("inclusive", lambda a: sg.cumsum(a), [[1, 2, INT_MAX]], "int32", [1, 3, INT_MIN + 2]),
    ("exclusive", lambda a: sg.cumsum(a, "exclusive"), [[1, 2, 3]], "int32", [0, 1, 3]),
    ("offsets", lambda a: sg.cumsum(a, "offsets"), [[1, 2, 3]], "int32", [0, 1, 3, 6]),
    ("compact", lambda a: sg.compact(a > 0, -1), [[0, 3, 0, 4]], "int32", [1, 3, -1, -1]),
    ("slice", lambda a: a[1:] - a[:-1], [[3, 5, 9]], "int32", [2, 4]),
    ("first and last", lambda a: a[0] * 100 + a[-1] + a * 0, [[3, 5, 9]], "int32", [309] * 3),
    ("segments", lambda a: sg.segment_ids(a, a.shape[0]), [[0, 2, 2, 4]], "int32", [0, 0, 2, 2]),
    ("past the segments", lambda a: sg.segment_ids(a, a.shape[0]), [[0, 1, 2]], "int32", [0, 1, 2]),
]


@pytest.mark.parametrize(
    ("fn", "arrays", "dtype", "want"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_right_values(fn: Any, arrays: list[Any], dtype: str, want: list[int]) -> None:
    assert run(fn, *arrays, dtype=dtype).tolist() == want


@pytest.mark.parametrize(
    ("fn", "want"),
    [(sg.reduce_sum, 0), (sg.reduce_max, INT_MIN), (sg.reduce_min, INT_MAX)],
)
def test_a_reduction_of_nothing_gives_its_identity(fn: Any, want: int) -> None:
    assert run(lambda a: fn(a) + a[0] * 0, []).tolist() == want


def test_pads_fill_from_the_actual_to_the_padded_extent() -> None:
    assert run(lambda a: a * 2, [5, 6], padded=5).tolist() == [10, 12, 1, 1, 1]
    assert run(lambda a: sg.cumsum(a, "offsets"), [5, 6], padded=4).tolist() == [0, 5, 11, 1, 1]
    assert run(lambda a: a * 2, [], padded=3).tolist() == [1, 1, 1]


def test_two_dims_expand_and_broadcast() -> None:
    def step(s: sg.Step) -> None:
        b = s.dim("N")
        x = s.input("x", (b,))
        grid = x.expand(1) * 10 + s.iota(3).expand(0)
        s.output("grid", grid, pad=-1)
        s.output("sums", sg.reduce_sum(grid), pad=-2)
        s.output("running", sg.cumsum(grid), pad=-3)

    c = sg.compile(sg.trace(step), {"N": 4})
    out = c(N=3, x=[1, 2, 3])
    assert out["grid"].tolist() == [[10, 11, 12], [20, 21, 22], [30, 31, 32], [-1, -1, -1]]
    assert out["sums"].tolist() == [33, 63, 93, -2]
    assert out["running"][1].tolist() == [20, 41, 63]


def test_scatter_writes_in_place_drops_and_lets_the_last_win() -> None:
    def step(s: sg.Step) -> None:
        n = s.dim("N")
        where = s.input("where", (n,))
        what = s.input("what", (n,))
        state = s.input("state", (4,), kind="state")
        new = sg.scatter(state, what, where)
        s.update(state, new)
        s.output("first", sg.gather(new, s.iota(n)), pad=0)

    graph = sg.trace(step)
    state = np.zeros(4, np.int32)
    c = sg.compile(graph, {"N": 8})
    c.bind("state", state)
    inputs = {
        "where": np.array([1, -1, 4, 3, 1], np.int32),
        "what": np.array([5, 6, 7, 8, 9], np.int32),
    }
    want = sg.evaluate(graph, {**inputs, "state": state.copy()}, {"N": 5}, {"N": 8})
    out = c(N=5, **inputs)
    assert state.tolist() == [0, 9, 0, 8]
    np.testing.assert_array_equal(want["state"], state)
    np.testing.assert_array_equal(want["first"], out["first"])
