"""Replays a step file (`stepgraph.recording`) on the compiled step: checks every output of every
step against the NumPy oracle, bit for bit, and times the replays.

    result = replay("steps.sgs")
    print(result.steps, result.mismatches, result.us_per_step)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from stepgraph import stages
from stepgraph.pipeline.compiled import Compiled, compile
from stepgraph.pipeline.errors import StepGraphError
from stepgraph.pipeline.executable import Executable, Outputs
from stepgraph.pipeline.groups import Group
from stepgraph.pipeline.oracle import Key, evaluate
from stepgraph.pipeline.trace import trace
from stepgraph.progress import Progress
from stepgraph.recording import RecordedStep, StepFileError, StepReader

# A header is not trusted: what the step it describes may cost in memory.
MAX_BYTES = 2 << 30
MAX_SHOWN = 10  # differences that are kept in words
SAMPLES = 8  # timed replays of each step


@dataclass(frozen=True)
class Layout:
    """What a step file's header says: the KV-cache groups, and the capacities of a step."""

    groups: tuple[Group, ...]
    max_reqs: int
    max_tokens: int
    producer: str

    def describe(self) -> str:
        """E.g. "9 recurrent groups and 1 attention group"."""
        kinds = [g.kind for g in self.groups]
        counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        return " and ".join(f"{n} {kind} group{'s' * (n != 1)}" for kind, n in counts.items())


@dataclass(frozen=True)
class StepInputs:
    """One step: B requests in batch order, T tokens.

    num_computed_tokens, num_scheduled_tokens, num_prompt_tokens: int32 (B,).
    block_table: {group name: int32 (B, columns used)}.
    """

    num_reqs: int
    num_tokens: int
    num_computed_tokens: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_prompt_tokens: np.ndarray
    block_table: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found.

    mismatches: outputs that differ from the oracle, summed over steps (an output of a group counts
    for itself); differences: the first ones in words. us_per_step: median over steps of the time to
    stage the host inputs and replay, in microseconds; p99_us likewise. truncated_bytes: of a frame
    cut off at the end of the file.
    """

    file: str
    producer: str
    groups: str
    steps: int
    max_batch: int
    outputs_checked: int
    mismatches: int
    differences: tuple[str, ...]
    us_per_step: float
    p99_us: float
    compile_seconds: float
    truncated_bytes: int

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "differences": list(self.differences)}


class StepFile:
    """A step file whose header and steps are checked as they are read.

    Iterating gives `StepInputs`, from the start each time. Raises StepFileError, naming the file,
    the step and what is wrong there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._reader = StepReader(path)
        self.layout = self._layout(self._reader.header)

    @property
    def truncated_bytes(self) -> int:
        return self._reader.truncated_bytes

    def __iter__(self) -> Iterator[StepInputs]:
        for number, recorded in enumerate(self._reader):
            try:
                yield step_inputs(self.layout, recorded)
            except ValueError as err:
                raise self._error(f"step {number}: {err}") from None

    def _error(self, text: str) -> StepFileError:
        return StepFileError(f"{self.path}: {text}")

    def _layout(self, header: Mapping[str, Any]) -> Layout:
        listed, capacities = header.get("groups"), header.get("capacities")
        if not isinstance(listed, list) or not listed:
            raise self._error("the header has no list of groups")
        if not isinstance(capacities, dict):
            raise self._error("the header has no capacities")
        groups = []
        for i, values in enumerate(listed):
            try:
                groups.append(_group(values))
            except ValueError as err:
                raise self._error(f"group {i} in the header: {err}") from None
        names = [g.name for g in groups]
        if len(set(names)) != len(names):
            raise self._error(f"two groups in the header have one name: {names}")
        limits = {}
        for name in ("max_reqs", "max_tokens"):
            value = capacities.get(name)
            if type(value) is not int or not 1 <= value < 2**31 - 1:
                raise self._error(f"capacity {name} must be an integer of at least 1, not {value}")
            limits[name] = value
        # Tables as they are bound and gathered, per-request and per-token fields.
        need = sum(8 * limits["max_reqs"] * g.max_blocks + 8 * limits["max_tokens"] for g in groups)
        if need > MAX_BYTES:
            raise self._error(f"its capacities ask for {need >> 20} MiB; at most {MAX_BYTES >> 20}")
        return Layout(tuple(groups), producer=str(header.get("producer", "unknown")), **limits)


def _group(values: object) -> Group:
    if not isinstance(values, dict):
        raise ValueError("it is not an object")
    optional = ("kernel_block_size", "window", "chunk")
    for name, value in values.items():
        if name in ("name", "kind", "cache_mode"):
            wanted, good = "a text", isinstance(value, str)
        elif name == "ring":
            wanted, good = "true or false", isinstance(value, bool)
        else:  # an unknown name is refused below, with the known ones
            wanted = "an integer below 2^31"
            good = type(value) is int and abs(value) < 2**31
            good = good or (name in optional and value is None)
        if not good:
            raise ValueError(f"{name} must be {wanted}, not {str(value)[:40]!r}")
    if "name" not in values:
        raise ValueError("it has no name")
    return Group.from_dict(values)


def step_inputs(layout: Layout, recorded: RecordedStep) -> StepInputs:
    """The inputs in a recorded step. Raises ValueError for what does not fit the layout."""
    sizes = {}
    for name, limit in (("num_reqs", layout.max_reqs), ("num_tokens", layout.max_tokens)):
        value = recorded.ints.get(name)
        if value is None or not 0 <= value <= limit:
            raise ValueError(f"{name} is {value}, the header's capacity is {limit}")
        sizes[name] = value
    b, t = sizes["num_reqs"], sizes["num_tokens"]

    def array(name: str, length: int, *, optional: bool = False) -> np.ndarray:
        found = recorded.arrays.get(name)
        if found is None and optional:
            return np.zeros(length, np.int32)
        if found is None:
            raise ValueError(f"array {name!r} is missing")
        if found.dtype != np.int32 or found.shape != (length,):
            raise ValueError(
                f"array {name!r} is {found.dtype} {found.shape}, it should be int32 ({length},)"
            )
        return found

    starts = array("query_start_loc", b + 1)
    scheduled = np.diff(starts)
    if starts[0] != 0 or starts[-1] != t or (scheduled < 0).any():
        raise ValueError(f"query_start_loc does not go up from 0 to num_tokens={t}")
    computed = array("num_computed_tokens", b)
    if (computed < 0).any():
        raise ValueError("num_computed_tokens is negative")
    if not np.array_equal(computed.astype(np.int64) + scheduled, array("seq_lens", b)):
        raise ValueError("seq_lens are not num_computed_tokens plus the scheduled tokens")
    tables = {}
    for g in layout.groups:
        table = recorded.arrays.get(f"block_table/{g.name}")
        if table is None or table.dtype != np.int32 or table.ndim != 2 or len(table) != b:
            raise ValueError(f"block_table/{g.name} should be int32 with {b} rows")
        if table.shape[1] > g.max_blocks:
            raise ValueError(
                f"block_table/{g.name} has {table.shape[1]} columns, the group {g.max_blocks}"
            )
        tables[g.name] = table
    # Not recorded: then every request is taken to be past its prompt.
    prompt = array("num_prompt_tokens", b, optional=True)
    return StepInputs(b, t, computed, scheduled.astype(np.int32), prompt, tables)


class Replayer:
    """The compiled `stages.full_step` of a layout, with block tables of its own bound to it.

    Like an engine's persistent tables, rows past the batch keep what earlier steps left there.
    Raises StepGraphError for groups that cannot be compiled.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        graph = trace(stages.full_step(layout.max_reqs, batch_order=True), layout.groups)
        self.step: Compiled = compile(graph, {"B": layout.max_reqs, "T": layout.max_tokens})
        self.tables = {
            g.name: np.zeros((layout.max_reqs, g.max_blocks), np.int32) for g in layout.groups
        }
        # A group's table that no output reads is not an input of the compiled graph.
        wanted = {n.param("groups") for n in graph.inputs if n.param("name") == "block_table"}
        self.step.bind("block_table", {n: t for n, t in self.tables.items() if (n,) in wanted})
        self._inputs = self.step.inputs

    def load(self, inputs: StepInputs) -> Executable:
        """Put a step's block tables in place; the executable of its batch shape."""
        b = inputs.num_reqs
        for name, table in inputs.block_table.items():
            columns = table.shape[1]
            self.tables[name][:b, :columns] = table
            self.tables[name][:b, columns:] = 0
        return self.step.executable(**self.step.bucket(B=b, T=inputs.num_tokens))

    def run(self, executable: Executable, inputs: StepInputs) -> Outputs:
        """Stage the host inputs and replay: what an engine does each step."""
        b, staged = inputs.num_reqs, self._inputs
        staged["num_computed_tokens"][:b] = inputs.num_computed_tokens
        staged["num_scheduled_tokens"][:b] = inputs.num_scheduled_tokens
        staged["num_prompt_tokens"][:b] = inputs.num_prompt_tokens
        return executable.replay(b, inputs.num_tokens)

    def oracle(self, inputs: StepInputs) -> dict[Key, np.ndarray]:
        """What every output should be, over its padded extent."""
        values: dict[Any, np.ndarray] = {
            "num_computed_tokens": inputs.num_computed_tokens,
            "num_scheduled_tokens": inputs.num_scheduled_tokens,
            "num_prompt_tokens": inputs.num_prompt_tokens,
        }
        values.update({("block_table", name): table for name, table in self.tables.items()})
        actual = {"B": inputs.num_reqs, "T": inputs.num_tokens}
        return evaluate(self.step.source_graph, values, actual, self.step.bucket(**actual))


def differences(got: Mapping[Key, Any], want: Mapping[Key, np.ndarray]) -> list[str]:
    """The outputs in `want` that `got` lacks or that differ, each in words. Where `want` has a
    scalar, `got` may have a plain number."""
    found = []
    for key, right in want.items():
        label = key if isinstance(key, str) else f"{key[0]}[{key[1]}]"
        if key not in got:
            found.append(f"{label} is missing")
            continue
        have = got[key] if isinstance(got[key], np.ndarray) else np.asarray(got[key], right.dtype)
        if have.shape != right.shape or have.dtype != right.dtype:
            found.append(f"{label} is {have.dtype} {have.shape}, not {right.dtype} {right.shape}")
        elif len(where := np.argwhere(have != right)):
            at = tuple(where[0].tolist())
            place = f" at [{', '.join(map(str, at))}]" if at else ""
            found.append(
                f"{label}: {len(where)} of {right.size} differ, "
                f"first{place}: {have[at]}, should be {right[at]}"
            )
    return found


def replay(path: str | os.PathLike[str], progress: Progress | None = None) -> ReplayResult:
    """Replay every step in the file, check it, then time it.

    Raises StepFileError for a file that is not a readable recording, or holds no whole step.
    """
    progress = progress or Progress(enabled=False)
    progress.note("reading")
    file = StepFile(path)
    sizes = [inputs.num_reqs for inputs in file]  # a bad step is said before anything is compiled
    if not sizes:
        raise StepFileError(f"{path}: holds no whole step")
    replayer = prepare(file, progress)
    checks = check(file, len(sizes), replayer, progress)
    samples = []
    progress.start("timing", len(sizes))
    for inputs in file:
        executable = replayer.load(inputs)
        replayer.run(executable, inputs)
        for _ in range(SAMPLES):
            start = time.perf_counter_ns()
            replayer.run(executable, inputs)
            samples.append(time.perf_counter_ns() - start)
        progress.advance()
    progress.close()
    return ReplayResult(
        file=str(path),
        producer=file.layout.producer,
        groups=file.layout.describe(),
        steps=len(sizes),
        max_batch=max(sizes),
        outputs_checked=checks.outputs,
        mismatches=checks.mismatches,
        differences=tuple(checks.differences),
        us_per_step=round(float(np.median(samples)) / 1e3, 3),
        p99_us=round(float(np.percentile(samples, 99)) / 1e3, 3),
        compile_seconds=round(replayer.step.stats.compile_seconds, 4),
        truncated_bytes=file.truncated_bytes,
    )


def prepare(file: StepFile, progress: Progress) -> Replayer:
    """Compile the step that the file's header describes."""
    progress.note("compiling (a few seconds the first time, then from the cache)")
    try:
        return Replayer(file.layout)
    except StepGraphError as err:
        raise StepFileError(f"{file.path}: its groups cannot be compiled: {err}") from err


@dataclass
class Checks:
    """Outputs compared with the oracle, how many differ, and the first differences in words."""

    outputs: int = 0
    mismatches: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, where: str, got: Mapping[Key, Any], want: Mapping[Key, np.ndarray]) -> None:
        found = differences(got, want)
        self.outputs += len(want)
        self.mismatches += len(found)
        room = MAX_SHOWN - len(self.differences)
        self.differences += [f"{where}: {text}" for text in found[:room]]


Way: TypeAlias = "Callable[[StepInputs, Mapping[str, int]], Mapping[Key, Any]]"


def check(
    steps: Iterable[StepInputs],
    total: int,
    replayer: Replayer,
    progress: Progress,
    others: Mapping[str, Way] | None = None,
) -> Checks:
    """Replay each step and compare it with the oracle; so too what `others` make of its inputs and
    padded extents."""
    checks = Checks()
    progress.start("checking against the oracle", total)
    for number, inputs in enumerate(steps):
        executable = replayer.load(inputs)
        _spoil(executable.outputs)
        outputs = replayer.run(executable, inputs)
        want = replayer.oracle(inputs)
        checks.add(f"step {number}", outputs, want)
        for name, way in (others or {}).items():
            got = way(inputs, executable.padded)
            checks.add(f"step {number}, {name}", got, want)
            _spoil(got)
        progress.advance()
    return checks


def _spoil(outputs: Mapping[Key, Any]) -> None:
    """An output that the next step does not write will not pass."""
    for array in outputs.values():
        if isinstance(array, np.ndarray):
            np.invert(array, out=array)


__all__ = ["Layout", "ReplayResult", "Replayer", "StepFile", "StepInputs", "replay"]
