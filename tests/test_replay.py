"""Replay of step files: what is right passes, each wrong value is counted, and no file, however
wrong, gets further than an error that says what is wrong with it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepgraph import Group
from stepgraph.demo_peers import Eager
from stepgraph.pipeline import host
from stepgraph.pipeline.lower import cpu
from stepgraph.pipeline.lower.source import Source
from stepgraph.progress import Progress
from stepgraph.recording import RecordedStep, StepFileError
from stepgraph.replay import Replayer, StepFile, check, replay
from tests import recordings

STEPS = recordings.run(recordings.MIXED, 60)
QUIET = Progress(enabled=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.sgs"


def test_the_toy_engine_makes_every_kind_of_step() -> None:
    sizes = {s.ints["num_reqs"] for s in STEPS}
    assert sizes == {0, 1, 2, 3, 4}
    chunked = [s for s in STEPS if s.arrays["num_computed_tokens"].any()]
    assert any((np.diff(s.arrays["query_start_loc"]) > 1).any() for s in chunked)


def test_every_output_of_every_step_equals_the_oracle(path: Path) -> None:
    result = replay(recordings.write(path, STEPS))
    # 12 outputs of the step, state_indices of 4 groups, two more of "all", slot_mapping of 2.
    assert result.outputs_checked == len(STEPS) * (12 + 4 + 2 + 2)
    assert (result.steps, result.max_batch, result.mismatches) == (60, 4, 0)
    assert result.differences == ()
    assert result.groups == "4 recurrent groups and 2 attention groups"
    assert 0 < result.us_per_step <= result.p99_us


def plant(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """A miscompilation: the generated code has `new` where `old` was."""
    generate = cpu.generate

    def wrong(plan: Any) -> Source:
        source = generate(plan)
        assert old in source.text
        return replace(source, text=source.text.replace(old, new))

    monkeypatch.setattr(host.cpu, "generate", wrong)


def test_a_miscompiled_stage_is_counted_in_each_step_and_group(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = recordings.MIXED[:2]
    steps = [s for s in recordings.run(groups, 40) if s.ints["num_reqs"]]
    recordings.write(path, steps, groups)
    plant(monkeypatch, "div32(", "1 + div32(")
    result = replay(path)
    assert result.mismatches == 2 * len(steps)
    assert len(result.differences) == 10
    assert result.differences[0].startswith(
        "step 0: state_indices[mamba]: 1 of 1 differ, first at [0, 0]: "
    )


def test_an_output_that_is_not_written_is_a_mismatch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings.write(path, STEPS)
    assert replay(path).mismatches == 0
    plant(monkeypatch, "fill4(", "False and fill4(")  # the pads are zero when memory is new
    result = replay(path)
    assert result.mismatches > 0
    assert any("seq_lens" in text for text in result.differences)


def test_tables_end_where_the_step_says(path: Path) -> None:
    group = (recordings.MIXED[0],)
    long, short = (
        RecordedStep(dict(s.ints), dict(s.arrays)) for s in recordings.run(group, 30)[-2:]
    )
    b = short.ints["num_reqs"]
    long.arrays["block_table/mamba"] = np.full((long.ints["num_reqs"], 8), 7, np.int32)
    short.arrays["block_table/mamba"] = np.full((b, 3), 9, np.int32)
    file = StepFile(recordings.write(path, [long, short], group))
    replayer = Replayer(file.layout)
    for inputs in file:
        replayer.load(inputs)
    table = replayer.tables["mamba"]
    assert (table[:b, :3] == 9).all() and not table[:b, 3:].any()


def test_prompt_lengths_are_optional(path: Path) -> None:
    steps = copy.deepcopy(STEPS)
    for step in steps:
        del step.arrays["num_prompt_tokens"]
    assert replay(recordings.write(path, steps)).mismatches == 0
    file = StepFile(path)
    replayer = Replayer(file.layout)
    for inputs in file:
        outputs = replayer.run(replayer.load(inputs), inputs)
        assert outputs.host("num_decodes") == inputs.num_reqs


def test_a_cut_file_is_replayed_up_to_the_cut(path: Path) -> None:
    recordings.write(path, STEPS)
    path.write_bytes(path.read_bytes()[:-3])
    result = replay(path)
    assert (result.steps, result.mismatches) == (len(STEPS) - 1, 0)
    assert result.truncated_bytes > 0


def test_a_file_without_a_whole_step_is_an_error(path: Path) -> None:
    with pytest.raises(StepFileError, match="holds no whole step"):
        replay(recordings.write(path, []))


# -- wrong files

GROUP = Group("a").to_dict()
HEADERS: list[tuple[dict[str, Any], str]] = [
    ({"groups": None}, "no list of groups"),
    ({"groups": []}, "no list of groups"),
    ({"groups": [3]}, "group 0 in the header: it is not an object"),
    ({"groups": [{"kind": "attention"}]}, "it has no name"),
    ({"groups": [{**GROUP, "colour": "red"}]}, "colour"),
    ({"groups": [{**GROUP, "colour": 3}]}, "unknown group fields"),
    ({"groups": [{**GROUP, "kind": "other"}]}, "kind must be one of"),
    ({"groups": [{**GROUP, "block_size": "16"}]}, "block_size must be an integer"),
    ({"groups": [{**GROUP, "block_size": True}]}, "block_size must be an integer"),
    ({"groups": [{**GROUP, "block_size": 2**31}]}, "block_size must be an integer below 2"),
    ({"groups": [{**GROUP, "block_size": None}]}, "block_size must be an integer"),
    ({"groups": [{**GROUP, "block_size": 0}]}, "block_size must be at least 1"),
    ({"groups": [{**GROUP, "name": ["a"]}]}, "name must be a text"),
    ({"groups": [{**GROUP, "ring": 1}]}, "ring must be true or false"),
    ({"groups": [GROUP, GROUP]}, "two groups in the header have one name"),
    ({"capacities": 3}, "no capacities"),
    ({"capacities": {"max_reqs": 4}}, "capacity max_tokens must be an integer"),
    ({"capacities": {"max_reqs": 0, "max_tokens": 8}}, "capacity max_reqs must be an integer"),
    ({"capacities": {"max_reqs": 2.5, "max_tokens": 8}}, "capacity max_reqs must be an integer"),
    ({"capacities": {"max_reqs": 2**24, "max_tokens": 8}}, "ask for 16384 MiB"),
    ({"groups": [{**GROUP, "max_blocks": 2**30}]}, "MiB"),
]


@pytest.mark.parametrize(("change", "message"), HEADERS)
def test_wrong_headers(path: Path, change: dict[str, Any], message: str) -> None:
    head = {**recordings.header([Group("a")]), **change}
    with pytest.raises(StepFileError, match=message) as caught:
        replay(recordings.write(path, STEPS, head=head))
    assert str(path) in str(caught.value)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


GOOD = RecordedStep(
    {"num_reqs": 2, "num_tokens": 3},
    {
        "query_start_loc": i32(0, 1, 3),
        "num_computed_tokens": i32(4, 5),
        "seq_lens": i32(5, 7),
        "num_prompt_tokens": i32(4, 7),
        "block_table/a": np.ones((2, 3), np.int32),
    },
)
WRONG: list[tuple[str, Any, str]] = [
    ("num_reqs", None, "num_reqs is None"),
    ("num_reqs", 5, "num_reqs is 5, the header's capacity is 4"),
    ("num_reqs", -1, "num_reqs is -1"),
    ("num_tokens", 65, "num_tokens is 65, the header's capacity is 64"),
    ("num_tokens", 4, "does not go up from 0 to num_tokens=4"),
    ("query_start_loc", i32(0, 4, 3), "does not go up"),
    ("query_start_loc", i32(1, 2, 3), "does not go up"),
    ("query_start_loc", i32(0, 3), r"it should be int32 \(3,\)"),
    ("query_start_loc", None, "'query_start_loc' is missing"),
    ("num_computed_tokens", np.array([4, 5], np.int64), "it should be int32"),
    ("num_computed_tokens", i32(-1, 5), "num_computed_tokens is negative"),
    ("seq_lens", i32(5, 8), "seq_lens are not"),
    ("num_prompt_tokens", i32(4), "it should be int32"),
    ("block_table/a", None, "block_table/a should be int32 with 2 rows"),
    ("block_table/a", np.ones((1, 3), np.int32), "block_table/a should be int32 with 2 rows"),
    ("block_table/a", np.ones((2, 3), np.int64), "block_table/a should be int32 with 2 rows"),
    ("block_table/a", np.ones(6, np.int32), "block_table/a should be int32 with 2 rows"),
    ("block_table/a", np.ones((2, 129), np.int32), "has 129 columns, the group 128"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_steps(path: Path, name: str, value: Any, message: str) -> None:
    bad = RecordedStep(dict(GOOD.ints), dict(GOOD.arrays))
    part: dict[str, Any] = bad.ints if name in bad.ints else bad.arrays
    part[name] = value
    if value is None:
        del part[name]
    recordings.write(path, [GOOD, bad], [Group("a")])
    with pytest.raises(StepFileError, match=f"step 1: .*{message}"):
        replay(path)


def test_the_step_before_the_wrong_one_is_good(path: Path) -> None:
    assert replay(recordings.write(path, [GOOD], [Group("a")])).mismatches == 0


# -- the demo's eager builds


@pytest.mark.parametrize("way", ["rebuild", "share"])
def test_eager_builds_equal_the_oracle(path: Path, way: str) -> None:
    file = StepFile(recordings.write(path, STEPS))
    replayer = Replayer(file.layout)
    eager = Eager(file.layout, replayer.tables)
    checks = check(file, len(STEPS), replayer, QUIET, {way: getattr(eager, way)})
    assert (checks.mismatches, checks.differences) == (0, [])
    assert checks.outputs == 2 * len(STEPS) * 20


def test_a_wrong_eager_build_is_named(path: Path) -> None:
    file = StepFile(recordings.write(path, STEPS))
    replayer = Replayer(file.layout)
    eager = Eager(file.layout, replayer.tables)
    eager.groups = eager.groups[:-1]  # forgets one group
    checks = check(file, len(STEPS), replayer, QUIET, {"mine": eager.share})
    assert checks.mismatches == len(STEPS)
    assert checks.differences[0] == "step 0, mine: slot_mapping[ring] is missing"


def test_only_the_first_of_a_kind_is_built_in_full(path: Path) -> None:
    layout = StepFile(recordings.write(path, STEPS)).layout
    assert Eager(layout, {}).first_of_kind == {"mamba", "drafted", "plain", "full", "ring"}
