"""Small recordings for tests: a toy engine's steps, requests joining, growing and leaving."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stepgraph import Group
from stepgraph.recording import RecordedStep, StepWriter

MAX_REQS, MAX_TOKENS = 4, 64
MIXED = (
    Group("mamba", "recurrent", 8, 8, cache_mode="align"),
    Group("mamba too", "recurrent", 8, 8, cache_mode="align"),
    Group("drafted", "recurrent", 4, 20, cache_mode="all", num_spec_tokens=2),
    Group("plain", "recurrent", 64, 2, num_spec_tokens=1),
    Group("full", block_size=8, max_blocks=8),
    Group("ring", block_size=4, max_blocks=3, ring=True),
)


@dataclass
class _Request:
    prompt: int
    total: int
    computed: int = 0
    blocks: dict[str, list[int]] = field(default_factory=dict)


def run(groups: Sequence[Group], steps: int, seed: int = 0) -> list[RecordedStep]:
    """The first `steps` steps; among them are empty ones, chunked prompts and mixed ones."""
    rng = np.random.default_rng(seed)
    ids = itertools.count(1)
    live: list[_Request] = []
    recorded = []
    for _ in range(steps):
        live = [r for r in live if r.computed < r.total]
        if len(live) < MAX_REQS and rng.random() < 0.5:
            prompt = int(rng.integers(1, 30))
            live.append(_Request(prompt, prompt + int(rng.integers(1, 30))))
        scheduled = [min(max(r.prompt - r.computed, 1), 16) for r in live]
        for r, n in zip(live, scheduled, strict=True):
            for g in groups:
                need = -(-(r.computed + n) // g.block_size)
                if g.kind == "recurrent":
                    need = 1 + g.num_spec_tokens + (need if g.cache_mode != "none" else 0)
                own = r.blocks.setdefault(g.name, [])
                own.extend(itertools.islice(ids, max(min(need, g.max_blocks) - len(own), 0)))
        recorded.append(_record(groups, live, scheduled))
        for r, n in zip(live, scheduled, strict=True):
            r.computed += n
    return recorded


def _record(
    groups: Sequence[Group], live: Sequence[_Request], scheduled: Sequence[int]
) -> RecordedStep:
    arrays = {
        "query_start_loc": np.cumsum([0, *scheduled]).astype(np.int32),
        "num_computed_tokens": np.array([r.computed for r in live], np.int32),
        "seq_lens": np.array(
            [r.computed + n for r, n in zip(live, scheduled, strict=True)], np.int32
        ),
        "num_prompt_tokens": np.array([r.prompt for r in live], np.int32),
    }
    for g in groups:
        used = max((len(r.blocks[g.name]) for r in live), default=0)
        table = np.zeros((len(live), used), np.int32)
        for row, r in zip(table, live, strict=True):
            row[: len(r.blocks[g.name])] = r.blocks[g.name]
        arrays[f"block_table/{g.name}"] = table
    return RecordedStep({"num_reqs": len(live), "num_tokens": sum(scheduled)}, arrays)


def header(groups: Sequence[Group]) -> dict[str, object]:
    return {
        "groups": [g.to_dict() for g in groups],
        "capacities": {"max_reqs": MAX_REQS, "max_tokens": MAX_TOKENS, "max_model_len": 64},
        "producer": "a toy engine",
    }


def write(
    path: Path,
    steps: Sequence[RecordedStep],
    groups: Sequence[Group] = MIXED,
    head: dict[str, object] | None = None,
) -> Path:
    with StepWriter(path, header(groups) if head is None else head) as writer:
        for step in steps:
            writer.write(step.arrays, **step.ints)
    return path
