"""What a figure was measured on, and small statistics."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np


def describe() -> dict[str, Any]:
    """Processor, cores this process may use, load, and versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        model = next(names, model)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("numpy", "numba", "stepgraph")},
    }


def line(machine: dict[str, Any]) -> str:
    """The description in one line."""
    versions = ", ".join(f"{k} {machine[k]}" for k in ("python", "numpy", "numba", "stepgraph"))
    return f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}; {versions}"


def summary(samples: Sequence[int]) -> dict[str, float]:
    """Median and 99th percentile of nanoseconds, in microseconds."""
    return {
        "median_us": round(float(np.median(samples)) / 1e3, 3),
        "p99_us": round(float(np.percentile(samples, 99)) / 1e3, 3),
    }
