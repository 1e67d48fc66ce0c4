"""What a user gets wrong is said in this project's own errors, and changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stepgraph as sg

LENGTHS = {"lengths": [3, 4, 5]}


@pytest.fixture
def compiled() -> sg.Compiled:
    def one_input(s: sg.Step) -> None:
        lengths = s.input("lengths", (s.dim("B"),))
        s.output("seq_lens", lengths + 1)
        s.output("total", sg.reduce_sum(lengths), pad=0, host=True)

    return sg.compile(sg.trace(one_input), {"B": 8})


@pytest.mark.parametrize("b", [1.5, "3", None, True, np.float64(3), [3]])
def test_extents_are_integers(compiled: sg.Compiled, b: Any) -> None:
    with pytest.raises(sg.CaptureError, match="B must be an integer"):
        compiled(B=b, **LENGTHS)
    with pytest.raises(sg.CaptureError, match="B must be an integer"):
        compiled.executable(B=b)


@pytest.mark.parametrize("b", [np.int32(3), np.uint8(3)])
def test_numpy_integers_are_integers(compiled: sg.Compiled, b: Any) -> None:
    assert compiled(B=b, **LENGTHS)["seq_lens"].tolist() == [4, 5, 6, 0]
    assert compiled.executable(B=4).replay(b).host("total") == 12


@pytest.mark.parametrize("extents", [(), (1, 2), (1.0,), ("1",), (None,), (9,), (-1,)])
def test_extents_of_a_replay(compiled: sg.Compiled, extents: tuple[Any, ...]) -> None:
    executable = compiled.executable(B=4)
    executable.replay(0)
    with pytest.raises(sg.CaptureError, match=r"integer extents of \('B',\)|does not fit"):
        executable.replay(*extents)
    assert executable.replay(0)["seq_lens"].tolist() == [0] * 4


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([3, 4], r"has shape \(2,\), this step reads \(3,\)"),
        (3, r"has shape \(\), this step reads \(3,\)"),
        ([1] * 9, r"staging holds \(8,\)"),
        ([[1, 2, 3]], r"has shape \(1, 3\)"),
        ([1.0, 2.0, 3.0], "is float64, the graph wants int32"),
        ([1, 2, 2**31], "is int64, the graph wants int32"),
        ([1, None, 3], "is object, the graph wants int32"),
        ([[1], [2, 3], [4]], "is no array"),
        (["a", "b", "c"], "the graph wants int32"),
    ],
)
def test_host_inputs(compiled: sg.Compiled, lengths: Any, says: str) -> None:
    compiled(B=3, **LENGTHS)
    with pytest.raises(sg.BindError, match=says):
        compiled(B=3, lengths=lengths)
    assert compiled(B=3)["seq_lens"].tolist() == [4, 5, 6, 0]  # what was staged before


def test_names_of_dims(compiled: sg.Compiled) -> None:
    for wrong in ({}, {"T": 1}, {"B": 1, "T": 1}):
        with pytest.raises(sg.CaptureError, match="the dims are B, got"):
            compiled.executable(**wrong)
        with pytest.raises(sg.CaptureError, match="the dims are B, got"):
            compiled.bucket(**wrong)
    with pytest.raises(sg.BindError, match="no host input 'widths'"):
        compiled(B=1, lengths=[1], widths=[1])


def test_only_scalars_are_host_values(compiled: sg.Compiled) -> None:
    out = compiled(B=3, **LENGTHS)
    assert out.host("total") == 12
    with pytest.raises(KeyError, match="it is no scalar"):
        out.host("seq_lens")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"capacity": {"B": 0}}, "must be 1"),
        ({"capacity": {"B": 1.5}}, "must be 1"),
        ({"capacity": {"B": "8"}}, "must be 1"),
        ({"capacity": {}}, "capacity of .* is missing"),
        ({"capacity": {"B": 8, "T": 8}}, "capacity names"),
        ({"buckets": {"B": []}}, "buckets of B"),
        ({"buckets": {"B": [0, 8]}}, "buckets of B"),
        ({"buckets": {"B": [9]}}, "buckets of B"),
        ({"buckets": {"B": ["8"]}}, "buckets of B"),
        ({"buckets": {"T": [8]}}, "buckets name"),
        ({"max_executables": 0}, "max_executables must be at least 1"),
        ({"target": "tpu"}, "no target 'tpu'"),
    ],
)
def test_compile_arguments(how: dict[str, Any], says: str) -> None:
    graph = sg.trace(lambda s: s.output("seq_lens", s.input("lengths", (s.dim("B"),))))
    with pytest.raises(sg.CompileError, match=says):
        sg.compile(graph, **{"capacity": {"B": 8}, **how})


def test_buckets_below_the_capacity() -> None:
    graph = sg.trace(lambda s: s.output("seq_lens", s.input("lengths", (s.dim("B"),))))
    compiled = sg.compile(graph, {"B": 8}, buckets={"B": [2, 4]})
    with pytest.raises(sg.CaptureError, match="B=5 is above the greatest bucket 4"):
        compiled(B=5, lengths=[1] * 5)


def test_dims_of_any_name() -> None:
    """A dim's name is the user's: it may be a word of the language that steps are compiled to."""
    names = ["i", "j", "g", "k", "for", "v1", "len_i", "ctx", "staging", "lane", "int"]

    def many(s: sg.Step) -> None:
        for n in names:
            s.output(n, sg.cumsum(s.input(f"in {n}", (s.dim(n),))), pad=-1)

    sizes = {n: 1 + i % 3 for i, n in enumerate(names)}
    compiled = sg.compile(sg.trace(many), dict.fromkeys(names, 4))
    out = compiled(**sizes, **{f"in {n}": range(1, 1 + size) for n, size in sizes.items()})
    for n, size in sizes.items():
        assert out[n].tolist()[:size] == [1, 3, 6][:size]
