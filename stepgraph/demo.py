"""`stepgraph demo`: a recorded run of a hybrid model, its metadata built in three ways.

The recording that ships with the package is of a granite-4.0-h-shaped model under vLLM: 9 Mamba2
groups and 1 attention group, requests joining and leaving. No engine, framework or GPU is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepgraph.demo_peers import Eager
from stepgraph.progress import Progress
from stepgraph.recording import StepFileError
from stepgraph.replay import Replayer, StepFile, StepInputs, Way, check, prepare

RECORDING = Path(__file__).parent / "data" / "granite4.sgs"
ROUNDS = 5  # times each step is timed in each way
FIRST, SHARED, COMPILED = (
    "rebuild every group (eager NumPy)",
    "share by hand as vLLM PR 29627 (eager NumPy)",
    "compiled by stepgraph",
)


@dataclass(frozen=True)
class Row:
    """One way to build the metadata: median microseconds a step, the first row's time over its
    own, and its own over the first row's."""

    name: str
    us_per_step: float
    p99_us: float
    ratio: float
    share: float


@dataclass(frozen=True)
class DemoResult:
    """The table and what was checked. times: {row name: float64 (steps,)}, median of each step, in
    microseconds."""

    rows: tuple[Row, ...]
    producer: str
    groups: str
    steps: int
    max_batch: int
    outputs_checked: int
    mismatches: int
    differences: tuple[str, ...]
    compile_seconds: float
    times: dict[str, np.ndarray]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the single steps' times."""
        values = {k: v for k, v in vars(self).items() if k != "times"}
        values["rows"] = [asdict(row) for row in self.rows]
        values["differences"] = list(self.differences)
        return values


def demo(progress: Progress | None = None, recording: Path = RECORDING) -> DemoResult:
    """Check all three ways against the oracle, bit for bit, on every step; then time them, step by
    step, in rotating order.

    Raises StepFileError if the recording cannot be read.
    """
    progress = progress or Progress(enabled=False)
    progress.note("reading the recording")
    file = StepFile(recording)
    steps = list(file)
    if not steps:
        raise StepFileError(f"{recording}: holds no whole step")
    replayer = prepare(file, progress)
    rebuilt, shared = (Eager(file.layout, replayer.tables) for _ in range(2))
    ways = {FIRST: rebuilt.rebuild, SHARED: shared.share}
    checks = check(steps, len(steps), replayer, progress, ways)
    times = _time(replayer, ways, steps, progress)
    progress.close()
    return DemoResult(
        rows=_rows(times),
        producer=file.layout.producer,
        groups=file.layout.describe(),
        steps=len(steps),
        max_batch=max(s.num_reqs for s in steps),
        outputs_checked=checks.outputs,
        mismatches=checks.mismatches,
        differences=tuple(checks.differences),
        compile_seconds=round(replayer.step.stats.compile_seconds, 4),
        times={name: np.median(samples, axis=1) for name, samples in times.items()},
    )


def _time(
    replayer: Replayer, eager: Mapping[str, Way], steps: list[StepInputs], progress: Progress
) -> dict[str, np.ndarray]:
    """{way: float64 (steps, ROUNDS), microseconds}."""
    times = {name: np.zeros((len(steps), ROUNDS)) for name in (FIRST, SHARED, COMPILED)}
    progress.start("timing the three ways", len(steps))
    for i, inputs in enumerate(steps):
        exe = replayer.load(inputs)
        ways: list[tuple[str, Callable[..., Any], Any, Any]] = [
            *((name, way, inputs, exe.padded) for name, way in eager.items()),
            (COMPILED, replayer.run, exe, inputs),
        ]
        for k in range(ROUNDS):
            for name, way, a, b in ways:
                start = time.perf_counter_ns()
                way(a, b)
                times[name][i, k] = (time.perf_counter_ns() - start) / 1e3
            ways.append(ways.pop(0))
        progress.advance()
    return times


def _rows(times: dict[str, np.ndarray]) -> tuple[Row, ...]:
    medians = {name: float(np.median(samples)) for name, samples in times.items()}
    whole = medians[FIRST]
    return tuple(
        Row(
            name,
            round(medians[name], 2),
            round(float(np.percentile(samples, 99)), 2),
            round(whole / medians[name], 2),
            round(medians[name] / whole, 4),
        )
        for name, samples in times.items()
    )


def table(result: DemoResult) -> str:
    """The result as a person reads it."""
    width = max(len(row.name) for row in result.rows)
    lines = [
        f"{result.steps} recorded steps of a hybrid model with {result.groups};",
        f"up to {result.max_batch} requests at a time, joining and leaving.",
        "Time to build the attention metadata of one step, on this machine's CPU:",
        "",
        f"  {'':<{width}}  us per step   faster    share",
    ]
    lines += [
        f"  {r.name:<{width}}  {r.us_per_step:>11.1f}  {r.ratio:>6.1f}x  {r.share:>7.1%}"
        for r in result.rows
    ]
    checked = f"{result.outputs_checked} arrays, {result.mismatches} differ"
    lines += [
        "",
        "us per step: the median; faster and share: against the first row.",
        f"All three checked on every step against the NumPy oracle, bit for bit: {checked}.",
        *(f"  {text}" for text in result.differences),
    ]
    return "\n".join(lines)


def plot(result: DemoResult, path: Path) -> bool:
    """Write the times as a picture. False if matplotlib is not installed; OSError or ValueError if
    the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    steps, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    colours = ("#b0413e", "#d98e32", "#2a7f62")
    for row, colour in zip(result.rows, colours, strict=True):
        steps.plot(result.times[row.name], color=colour, linewidth=1.2, label=row.name)
    steps.set_yscale("log")
    steps.set_xlabel("step")
    steps.set_ylabel("us per step")
    steps.set_title(f"{result.groups}", fontsize=10)
    steps.legend(fontsize=7)
    values = [row.us_per_step for row in result.rows]
    drawn = bars.bar(["rebuild", "share by hand", "compiled"], values, color=colours)
    bars.bar_label(drawn, [f"{v:.1f} us" for v in values], fontsize=8)
    bars.set_title("median", fontsize=10)
    figure.savefig(path, dpi=130)
    return True
