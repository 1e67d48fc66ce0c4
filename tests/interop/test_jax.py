"""`to_jax` equals the oracle, under one `jax.jit` per batch shape."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stepgraph as sg
from stepgraph import stages
from stepgraph.interop.jax import to_jax
from tests.pipeline.random_graphs import random_groups, random_step
from tests.pipeline.test_random_graphs import fill

jax = pytest.importorskip("jax", reason="JAX is not installed")
PADDED = {"B": 12, "T": 20}


@pytest.fixture(autouse=True)
def _wide() -> Any:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def equal(got: Any, want: Any, text: object = "") -> None:
    assert set(got) == set(want)
    for key, array in want.items():
        have = np.asarray(got[key])
        assert (have.dtype, have.shape) == (array.dtype, array.shape), key
        np.testing.assert_array_equal(have, array, err_msg=f"{key}\n{text}")


def jitted(graph: sg.Graph, padded: dict[str, int] = PADDED) -> Any:
    """The function under jit; keys become strings, which JAX can sort."""
    fn = to_jax(graph, padded)
    names = {str(key): key for key in keys(graph)}
    compiled = jax.jit(lambda inputs, actual: {str(k): v for k, v in fn(inputs, actual).items()})
    return lambda inputs, actual: {names[k]: v for k, v in compiled(inputs, actual).items()}


def keys(graph: sg.Graph) -> list[Any]:
    return [
        out.name if out.groups is None else (out.name, group)
        for out in graph.outputs
        for group in out.groups or ("",)
    ]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_random_graphs(seed: int) -> None:
    groups = random_groups(random.Random(seed))
    try:
        graph = sg.trace(random_step(seed), groups)
    except sg.TraceError:
        return
    run = jitted(graph)
    rng = np.random.default_rng(seed)
    sizes = {d: PADDED[d] for d in graph.dims}
    for _ in range(3):
        extents = {d: int(rng.integers(0, n + 1)) for d, n in sizes.items()}
        inputs: dict[str, Any] = {}
        for node in graph.inputs:
            shape = [sg.pipeline.ir.extent_of(d, sizes) for d in node.aval.shape]
            array = np.zeros(shape, node.aval.dtype)
            fill(array, rng)
            own = node.param("groups")
            if own is None:
                inputs[node.param("name")] = array
            else:
                inputs.setdefault(node.param("name"), {})[own[0]] = array
        padded = {d: n for d, n in PADDED.items() if d in graph.dims}
        equal(run(inputs, extents), sg.evaluate(graph, inputs, extents, padded), graph)


def hybrid() -> list[sg.Group]:
    return [
        sg.Group("full", block_size=16, max_blocks=4, kernel_block_size=4),
        sg.Group("window", block_size=4, max_blocks=16, window=8),
        sg.Group("align", "recurrent", 16, 4, cache_mode="align"),
        sg.Group("all", "recurrent", 16, 4, cache_mode="all"),
    ]


def test_a_whole_step_in_one_compilation() -> None:
    groups = hybrid()
    source = sg.trace(stages.full_step(8), groups)
    padded = {"B": 8, "T": 32}
    run = jitted(source, padded)
    batched = sg.compile(source, padded).graph
    run_batched = jitted(batched, padded)
    rng = np.random.default_rng(0)
    for _ in range(8):
        b = int(rng.integers(0, 9))
        inputs: dict[str, Any] = {
            "rows": np.resize(rng.permutation(8), 8).astype(np.int32),
            "num_computed_tokens": rng.integers(0, 60, 8).astype(np.int32),
            "num_scheduled_tokens": rng.integers(1, 4, 8).astype(np.int32),
            "num_prompt_tokens": rng.integers(0, 60, 8).astype(np.int32),
            "block_table": {
                g.name: rng.integers(-1, 99, (8, g.max_blocks)).astype(np.int32) for g in groups
            },
            "num_blocks": {g.name: np.full(8, g.max_blocks, np.int32) for g in groups},
        }
        extents = {"B": b, "T": int(inputs["num_scheduled_tokens"][:b].sum())}
        want = sg.evaluate(source, inputs, extents, padded)
        equal(run(inputs, extents), want)
        equal(run_batched(inputs, extents), want)


def test_scatter_lets_the_last_update_win() -> None:
    def step(s: sg.Step) -> None:
        b = s.dim("B")
        state = s.input("state", (5,), kind="state")
        s.update(state, sg.scatter(state, s.input("v", (b,)), s.input("at", (b,))))

    graph, rng = sg.trace(step), np.random.default_rng(1)
    run = jitted(graph, {"B": 9})
    for b in (0, 4, 9):
        inputs = {
            "state": rng.integers(0, 9, 5).astype(np.int32),
            "v": rng.integers(10, 99, 9).astype(np.int32),
            "at": rng.integers(-2, 7, 9).astype(np.int32),
        }
        equal(run(inputs, {"B": b}), sg.evaluate(graph, inputs, {"B": b}, {"B": 9}))


def test_what_does_not_fit_is_said() -> None:
    graph = sg.trace(stages.full_step(8), hybrid())
    with pytest.raises(sg.CaptureError, match="T"):
        to_jax(graph, {"B": 8})
    fn = to_jax(graph, {"B": 8, "T": 32})
    with pytest.raises(sg.CaptureError, match="T"):
        fn({}, {"B": 1})
    with pytest.raises(sg.BindError, match="has no value"):
        fn({}, {"B": 1, "T": 1})
    wrong = {node.param("name"): np.zeros(3, np.int64) for node in graph.inputs}
    with pytest.raises(sg.BindError, match="int64, the graph wants int32"):
        fn(wrong, {"B": 1, "T": 1})
    narrow = {name: np.zeros(3, np.int32) for name in wrong}
    with pytest.raises(sg.BindError, match=r"shape \(3,\), not \(8,\)"):
        fn(narrow, {"B": 1, "T": 1})
    jax.config.update("jax_enable_x64", False)
    with pytest.raises(sg.CompileError, match="JAX_ENABLE_X64=1"):
        fn({}, {"B": 1, "T": 1})
