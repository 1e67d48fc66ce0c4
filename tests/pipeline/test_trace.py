"""What cannot become a graph is said while tracing, with the stage's name and its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import stepgraph as sg
from stepgraph import stages


def traced(fn: Callable[[sg.Step], Any], groups: Any = ()) -> sg.Graph:
    return sg.trace(fn, groups)


def lens(s: sg.Step) -> sg.Value:
    return s.input("lens", (s.dim("B"),))


def test_graph_prints_like_a_jaxpr() -> None:
    def step(s: sg.Step) -> None:
        b = s.dim("B")
        computed = s.input("num_computed_tokens", (b,))
        scheduled = s.input("num_scheduled_tokens", (b,))
        s.output("seq_lens", stages.seq_lens(computed, scheduled))

    assert str(traced(step)).splitlines() == [
        "graph(B):",
        "  %0:   int32[B]               = input 'num_computed_tokens' host",
        "  %1:   int32[B]               = input 'num_scheduled_tokens' host",
        "  %2:   int32[B]               = add %0 %1  # seq_lens",
        "  out 'seq_lens' = %2 pad 0",
    ]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda x: bool(x > 0),
        lambda x: 1 if x[0] > 3 else 2,
        lambda x: int(x[0]),
        lambda x: list(x),
        lambda x: len(x),
        lambda x: float(x[0]),
        lambda x: 3 in x,
        lambda x: range(x[0]),
    ],
)
def test_python_control_flow_on_a_value_names_stage_and_line(misuse: Callable[[Any], Any]) -> None:
    @sg.stage
    def my_stage(x: sg.Value) -> sg.Value:
        misuse(x)
        return x

    def step(s: sg.Step) -> None:
        s.output("out", my_stage(lens(s)), pad=0)

    with pytest.raises(sg.TraceError) as err:
        traced(step)
    text = str(err.value)
    assert "exists only when the step runs" in text
    assert "in stage 'my_stage' at test_trace.py:" in text
    assert re.search(r"called from test_trace\.py:\d+", text)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda s, x: x + s.input("w", (s.dim("T"),)), "shapes differ"),
        (lambda s, x: x + s.input("w", (s.dim("B"),), "int64"), "dtypes differ.*use cast"),
        (lambda s, x: x / 2, "use `//`"),
        (lambda s, x: x + 2**31, "does not fit int32"),
        (lambda s, x: x + 1.5, "expected a traced value or int, got float"),
        (lambda s, x: (x > 0) + (x > 1), "arithmetic on bool"),
        (lambda s, x: sg.gather(x, x, x), "needs 1 indices, got 2"),
        (lambda s, x: sg.gather(x, x > 0), "index must be an integer"),
        (lambda s, x: sg.select(x, 1, 2), "needs a bool condition"),
        (lambda s, x: sg.cumsum(x, "backwards"), "unknown cumsum mode"),
        (lambda s, x: x[::2], "is not an int or a slice"),
        (lambda s, x: x["a"], "not an int or a slice"),
        (lambda s, x: sg.compact(x, 0), "needs a bool mask"),
        (lambda s, x: x.cast("float32"), "dtype must be one of"),
        (lambda s, x: s.input("w", (s.dim("B"),), "int16"), "dtype must be one of"),
        (lambda s, x: s.input("w", (0,)), "extents must be at least 1"),
        (lambda s, x: s.input("w", (1, 2, 3)), "at most two dims"),
        (lambda s, x: s.input("w", kind="gpu"), "kind must be"),
    ],
)
def test_misuse_says_what_is_wrong(body: Callable[[Any, Any], Any], says: str) -> None:
    def step(s: sg.Step) -> None:
        body(s, lens(s))
        s.output("out", lens(s), pad=0)

    with pytest.raises(sg.TraceError, match=says) as err:
        traced(step)
    assert "test_trace.py:" in str(err.value)


def test_a_name_used_twice_names_both_places() -> None:
    def step(s: sg.Step) -> None:
        s.output("out", lens(s), pad=0)
        s.output("out", 1, pad=0)

    with pytest.raises(sg.TraceError, match=r"declared twice; the first is .*test_trace\.py:"):
        traced(step)

    def inputs(s: sg.Step) -> None:
        lens(s)
        lens(s)

    with pytest.raises(sg.TraceError, match="input 'lens' is declared twice"):
        traced(inputs)


def test_one_field_shared_and_per_group_is_a_clash() -> None:
    def step(s: sg.Step) -> None:
        x = lens(s)
        s.groups[0].output("out", x, pad=0)
        s.output("out", x, pad=0)

    with pytest.raises(sg.TraceError, match="declared twice"):
        traced(step, [sg.Group("a")])


def test_an_output_some_group_never_writes() -> None:
    groups = [sg.Group("m0", "recurrent"), sg.Group("m1", "recurrent"), sg.Group("attn")]

    def step(s: sg.Step) -> None:
        s.groups[0].output("state_indices", lens(s))

    with pytest.raises(sg.TraceError, match="written for group 'm0' but never for group 'm1'"):
        traced(step, groups)

    def skipping(s: sg.Step) -> None:
        step(s)
        s.groups[1].skip("state_indices")

    assert len(traced(skipping, groups).outputs) == 1


def test_an_output_without_a_known_pad_must_say_it() -> None:
    def step(s: sg.Step) -> None:
        s.output("my_field", lens(s))

    with pytest.raises(sg.TraceError, match="not a field of the padding contract: say pad="):
        traced(step)


def test_no_output_is_an_error() -> None:
    with pytest.raises(sg.TraceError, match="declared no output"):
        traced(lambda s: lens(s))


def test_values_of_two_traces_do_not_mix() -> None:
    kept: list[sg.Value] = []

    def first(s: sg.Step) -> None:
        kept.append(lens(s))
        s.output("out", kept[0], pad=0)

    def second(s: sg.Step) -> None:
        s.output("out", lens(s) + kept[0], pad=0)

    traced(first)
    with pytest.raises(sg.TraceError, match="a value of another trace"):
        traced(second)


def test_a_stage_without_traced_arguments() -> None:
    with pytest.raises(sg.TraceError, match="stage 'seq_lens' got no traced value"):
        stages.seq_lens(1, 2)  # type: ignore[arg-type]


def test_group_names_must_differ() -> None:
    with pytest.raises(sg.TraceError, match="group names must differ"):
        traced(lambda s: None, [sg.Group("a"), sg.Group("a")])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "mamba"}, "kind must be one of"),
        ({"cache_mode": "sometimes"}, "cache_mode must be one of"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"max_blocks": 0}, "max_blocks must be at least 1"),
        ({"kernel_block_size": 5, "block_size": 16}, "must divide block_size"),
        ({"num_spec_tokens": -1}, "must not be negative"),
        ({"window": 0}, "window must be at least 1"),
        ({"name": ""}, "needs a non-empty name"),
    ],
)
def test_a_group_checks_itself(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sg.Group(**{"name": "g", **fields})


def test_a_request_row_is_not_a_state_index() -> None:
    """SGLang 23975: the request-pool index was passed where the state-pool index is meant."""

    def step(s: sg.Step) -> None:
        b = s.dim("B")
        rows = s.input("rows", (b,), unit="row")
        state_of_row = s.input("state_of_row", (8,), kind="device", unit="state", axes=("row",))
        states = s.input("states", (16,), kind="device", axes=("state",))
        s.output("right", sg.gather(states, sg.gather(state_of_row, rows)), pad=0)
        s.output("wrong", sg.gather(states, rows), pad=0)

    with pytest.raises(sg.TraceError, match="index counts rows, the operand's axis states"):
        traced(step)


@pytest.mark.parametrize("wrong", ["read", "write", "read after an update"])
def test_an_updated_state_knows_what_its_rows_are(wrong: str) -> None:
    def step(s: sg.Step) -> None:
        b = s.dim("B")
        rows, blocks = s.input("rows", (b,), unit="row"), s.input("blocks", (b,), unit="block")
        state = s.input("state", (8,), kind="state", axes=("row",))
        if wrong == "write":
            sg.scatter(state, 1, blocks)
        after = sg.scatter(sg.scatter(state, 1, rows), 2, rows) if "after" in wrong else state
        s.output("right", sg.gather(after, rows), pad=0)
        s.output("wrong", sg.gather(after, blocks), pad=0)

    with pytest.raises(sg.TraceError, match="index counts blocks, the operand's axis rows"):
        traced(step)


def test_a_token_is_not_a_page() -> None:
    """SGLang 38187: page ids were pushed through a token-granular map, never divided."""

    def step(s: sg.Step) -> None:
        p = s.dim("P")
        pages = s.input("pages", (p,), unit="page")
        token_map = s.input("token_map", (64,), kind="device", unit="token", axes=("token",))
        tokens = (pages * 4).cast("int32")  # a product has no unit: page 2 starts at token 8
        s.output("window_pages", sg.gather(token_map, tokens) // 4, pad=0)
        s.output("wrong", sg.gather(token_map, pages), pad=0)

    with pytest.raises(sg.TraceError, match="index counts pages, the operand's axis tokens"):
        traced(step)


def test_ids_of_two_kinds_do_not_compare() -> None:
    def step(s: sg.Step) -> None:
        b = s.dim("B")
        s.output("out", s.input("r", (b,), unit="row") == s.input("k", (b,), unit="block"), pad=0)

    with pytest.raises(sg.TraceError, match="ids of different kinds: block and row"):
        traced(step)
