"""Real vLLM engines with the shim off, on and verifying: the same tokens and log-probabilities."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from . import checkpoint, engine
from .engine import Request, Result
from .workloads import joining_and_leaving, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODELS = ("granite4-tiny", "nemotronh")


@functools.cache
def run(model: str, mode: str | None, caching: bool) -> Result:
    path = checkpoint.cached(model)
    return engine.run(path, joining_and_leaving(), mode=mode, prefix_caching=caching)


def decode_share(result: Result) -> float:
    """Compiled steps among all that are not prefills."""
    native = sum(n for reason, n in result.counters["native"].items() if reason != "prefill")
    return result.counters["compiled"] / (result.counters["compiled"] + native)


def same(a: Result, b: Result) -> bool:
    return a.tokens == b.tokens and a.logprobs == b.logprobs


@pytest.mark.parametrize("caching", [False, True], ids=["no caching", "prefix caching"])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_and_logprobs_are_the_same_off_on_and_verify(model: str, caching: bool) -> None:
    off, on, verify = (run(model, mode, caching) for mode in (None, "on", "verify"))
    assert off.counters["status"] == "off" and off.counters["compiled"] == 0
    assert same(off, on) and same(off, verify)
    for result in (on, verify):
        assert result.counters["status"] == "installed"
        assert result.counters["mismatches"] == result.counters["errors"] == 0
        assert result.counters["compiled"] > 30
        assert decode_share(result) >= 0.95
    assert verify.counters["verified"] == verify.counters["compiled"]
    assert on.counters["verified"] < on.counters["compiled"] / 2


@pytest.mark.parametrize("fault", ["corrupt_state_index", "corrupt_slot"])
@pytest.mark.parametrize("model", MODELS)
def test_the_checkpoints_outputs_depend_on_the_metadata(model: str, fault: str) -> None:
    wrong = engine.run(
        checkpoint.cached(model),
        joining_and_leaving(),
        prefix_caching=True,
        hook=f"hooks.py:{fault}",
    )
    assert wrong.extra["planted"] == 1
    right = run(model, None, True)
    assert wrong.logprobs != right.logprobs and wrong.tokens != right.tokens


def test_a_wrong_value_is_reported_and_vllms_results_are_kept(tmp_path: Path) -> None:
    result = engine.run(
        checkpoint.cached("granite4-tiny"),
        joining_and_leaving(),
        mode="verify",
        prefix_caching=True,
        hook="hooks.py:corrupt_compiled",
        env={"STEPGRAPH_VLLM_DIR": str(tmp_path)},
    )
    assert result.extra["planted"] > 3
    assert result.counters["mismatches"] == result.extra["planted"]
    assert same(result, run("granite4-tiny", None, True))
    assert result.log.count("differs from vLLM's") == 1
    assert "state_indices_tensor_d" in result.log
    (file,) = tmp_path.glob("*.sgs")
    assert file.name in result.log


def test_a_fault_from_the_start_is_found_before_its_first_use(tmp_path: Path) -> None:
    result = engine.run(
        checkpoint.cached("granite4-tiny"),
        joining_and_leaving(),
        mode="on",
        prefix_caching=True,
        hook="hooks.py:corrupt_compiled_at_once",
        env={"STEPGRAPH_VLLM_DIR": str(tmp_path)},
    )
    assert result.counters["mismatches"] == 1 and result.counters["compiled"] == 0
    assert result.counters["native"]["disabled after a mismatch"] > 30
    assert same(result, run("granite4-tiny", None, True))


def test_exceptions_of_ours_leave_the_step_to_vllm() -> None:
    result = engine.run(
        checkpoint.cached("granite4-tiny"),
        joining_and_leaving(),
        mode="on",
        prefix_caching=True,
        hook="hooks.py:raise_in_compiled",
    )
    assert result.extra["raised"] == 3  # then it is not tried again
    assert result.counters["errors"] == result.counters["native"]["error"] == 3
    assert result.counters["native"]["disabled after errors"] > 20
    assert result.counters["compiled"] > 3
    assert result.log.count("RuntimeError: planted") == 1
    assert same(result, run("granite4-tiny", None, True))


def test_an_engine_that_cannot_be_compiled_serves_all_the_same() -> None:
    result = engine.run(
        checkpoint.cached("granite4-tiny"),
        joining_and_leaving(),
        mode="on",
        prefix_caching=True,
        hook="hooks.py:raise_in_attach",
    )
    assert result.counters["errors"] == 1 and result.counters["compiled"] == 0
    assert "could not attach" in result.log
    assert same(result, run("granite4-tiny", None, True))


def test_an_exception_of_vllms_own_comes_through() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: vLLM's own fault") as failure:
        engine.run(
            checkpoint.cached("granite4-tiny"),
            joining_and_leaving()[:1],
            mode="verify",
            hook="hooks.py:native_raises",
        )
    assert "AttributeError" not in str(failure.value)  # and nothing of ours is raised instead


def test_started_by_the_entry_point_nothing_heavy_is_loaded() -> None:
    result = engine.run(
        checkpoint.cached("granite4-tiny"),
        joining_and_leaving(),
        mode="on",
        prefix_caching=True,
        hook="hooks.py:what_is_loaded",
        fresh=True,
    )
    loaded = result.extra
    assert loaded == {"numba": False, "llvmlite": False, "stepgraph.interop.vllm": True}
    assert result.counters["compiled"] > 30
    assert same(result, run("granite4-tiny", None, True))


def test_block_tables_that_move_are_bound_again() -> None:
    result = engine.run(
        checkpoint.cached("granite4-tiny"),
        joining_and_leaving(),
        mode="on",
        prefix_caching=True,
        hook="hooks.py:replace_tables",
    )
    assert result.counters["attached"] == 2
    assert result.counters["errors"] == result.counters["mismatches"] == 0
    assert decode_share(result) >= 0.95
    assert same(result, run("granite4-tiny", None, True))


@pytest.mark.parametrize("caching", [False, True], ids=["no caching", "prefix caching"])
@pytest.mark.parametrize("model", MODELS)
def test_random_batches_equal_vllms_builders(model: str, caching: bool) -> None:
    result = engine.run(
        checkpoint.cached(model),
        joining_and_leaving(),
        mode="on",
        prefix_caching=caching,
        hook="hooks.py:random_batches",
    )
    assert result.extra["batches"] == 4000
    assert result.extra["differences"] == []
    assert 0 < result.extra["first_chunks"] < 2000
    assert same(result, run(model, None, caching))  # and the runner's state was left as it was


def test_a_prompt_seen_before() -> None:
    """Several recurrent groups, prefix caching, a prompt whose first block is in the cache: in vLLM
    PR 34874's thread such a run gave NaN, as later groups kept the first group's fields."""
    shared = prompt(9, 128)
    second = [*shared, *prompt(10, 20)]
    requests = [
        Request(shared, tokens=6),
        Request(second, tokens=24, at=10),
        Request([*shared, *prompt(11, 7)], tokens=24, at=12),
        Request(second, tokens=24, at=14),
    ]
    path = checkpoint.cached("granite4-tiny")
    off, on = (engine.run(path, requests, mode=mode, prefix_caching=True) for mode in (None, "on"))
    scheduled = [query for _, query, _ in off.builds if query > 1]
    # The first prompt leaves nothing whole in the cache; the second is cut where its block ends.
    assert scheduled == [128, 128, 20, 7, 20], "the last two were to find their first block cached"
    assert same(off, on) and on.counters["mismatches"] == 0 and on.counters["compiled"] > 20

    uncached = engine.run(path, requests, mode="on", prefix_caching=False)
    assert uncached.tokens == on.tokens
    for ours, reference in zip(on.logprobs, uncached.logprobs, strict=True):
        for a, b in zip(ours, reference, strict=True):
            assert a.keys() == b.keys()
            for token in a:
                assert a[token] == pytest.approx(b[token], abs=1e-2, rel=1e-2)
