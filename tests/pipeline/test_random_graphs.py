"""Each target equals the oracle bit for bit, on random graphs and random steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import stepgraph as sg
from tests.device.available import STANDS, Stand

from .random_graphs import random_groups, random_step

CAPACITY = {"B": 12, "T": 20}


def fill(array: np.ndarray, rng: np.random.Generator) -> None:
    """Plausible values, values that are no valid index, and the type's limits."""
    if array.dtype == np.bool_:
        array[...] = rng.integers(0, 2, array.shape).astype(bool)
    elif rng.random() < 0.3:
        info = np.iinfo(array.dtype)
        array[...] = rng.integers(info.min, info.max, array.shape, array.dtype, endpoint=True)
    else:
        values = rng.integers(-4, 22, array.shape)
        array[...] = np.sort(values) if array.ndim and rng.random() < 0.5 else values


def check(seed: int, target: str, device: Any = None, steps: int = 6) -> None:
    """A random graph on a target: `steps` random steps, each equal to the oracle's."""
    groups = random_groups(random.Random(seed))
    try:
        graph = sg.trace(random_step(seed), groups)
    except sg.TraceError as err:  # e.g. a literal that does not fit: tracing refused it
        note(str(err))
        return
    compiled = sg.compile(graph, CAPACITY, target=target, device=device)
    rng = np.random.default_rng(seed)
    tables = {g.name: np.zeros((9, g.max_blocks), np.int32) for g in groups}
    if groups:
        compiled.bind("table", tables)
    for _ in range(steps):
        extents = {"B": int(rng.integers(0, 13)), "T": int(rng.integers(0, 21))}
        for array in [*compiled.inputs.values(), *tables.values()]:
            fill(array, rng)
        inputs = {**compiled.inputs, "table": tables}
        want = sg.evaluate(graph, inputs, extents, compiled.bucket(**extents))
        out = compiled(**extents)
        assert out.keys() == want.keys()
        for key, array in want.items():
            assert (out[key].dtype, out[key].shape) == (array.dtype, array.shape), key
            np.testing.assert_array_equal(out[key], array, err_msg=f"{key} at {extents}\n{graph}")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_cpu_target_equals_the_oracle(seed: int) -> None:
    check(seed, "cpu")


@pytest.mark.parametrize("stand", STANDS.values(), ids=list(STANDS))
def test_device_targets_equal_the_oracle(stand: Stand) -> None:
    if stand.missing:
        pytest.skip(f"{stand.target}: {stand.missing}")
    examples = 8 if stand.slow else 40

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32))
    def equal(seed: int) -> None:
        check(seed, stand.target, stand.device(), steps=2 if stand.slow else 6)

    equal()
