"""Time to trace and compile a step of 46 KV-cache groups, each time in a fresh process: cold with
an empty cache folder, then warm from that folder; and the time that `import stepgraph` takes.

    python benchmarks/compile_time.py [--json]

Cold includes the import of Numba, which a warm start does not need.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

GROUPS = 46
CHILD = f"""
import json, sys, time
import numpy
t0 = time.perf_counter()
import stepgraph as sg
t1 = time.perf_counter()
from stepgraph import stages
groups = [
    sg.Group(f"attention {{i}}", block_size=128, max_blocks=64)
    if i % 10 == 9
    else sg.Group(f"recurrent {{i}}", "recurrent", 128, 64, cache_mode="align")
    for i in range({GROUPS})
]
t2 = time.perf_counter()
graph = sg.trace(stages.full_step(64), groups)
t3 = time.perf_counter()
if sys.argv[1] == "cold":  # what compiling imports anyway, to tell the two apart
    import llvmlite.binding, numba
t4 = time.perf_counter()
step = sg.compile(graph, {{"B": 64, "T": 512}})
t5 = time.perf_counter()
print(json.dumps({{
    "import_s": t1 - t0, "trace_s": t3 - t2, "numba_s": t4 - t3, "compile_s": t5 - t4,
    "cpu_s": time.process_time(),
    "native_s": step.stats.compile_seconds, "numba_loaded": "numba" in sys.modules,
    "compiled": step.stats.compiles, "from_disk": step.stats.disk_hits,
    "source_lines": step.source.text.count(chr(10)),
}}))
"""


def run(cache: Path, kind: str) -> dict[str, Any]:
    """One fresh process with this cache folder."""
    environment = {**os.environ, "STEPGRAPH_CACHE_DIR": str(cache)}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, kind], env=environment, stdout=subprocess.PIPE, check=True
    )
    result: dict[str, Any] = json.loads(child.stdout)
    return result


def measure(repeat: int) -> dict[str, Any]:
    cold, warm = [], []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(run(Path(folder), "cold"))
            warm.append(run(Path(folder), "warm"))
    if any(r["from_disk"] for r in cold) or not all(r["from_disk"] for r in warm):
        raise SystemExit("the cache folder was not used as expected")

    def median(runs: list[dict[str, Any]], *names: str) -> float:
        return round(statistics.median(sum(r[n] for n in names) for r in runs), 4)

    return {
        "groups": GROUPS,
        "cold_s": median(cold, "trace_s", "numba_s", "compile_s"),
        "numba_import_s": median(cold, "numba_s"),
        "warm_s": median(warm, "trace_s", "compile_s"),
        "trace_s": median(cold + warm, "trace_s"),
        "passes_s": round(median(warm, "compile_s") - median(warm, "native_s"), 4),
        "cold_process_cpu_s": median(cold, "cpu_s"),
        "import_s": median(cold + warm, "import_s"),
        "warm_loads_numba": any(r["numba_loaded"] for r in warm),
        "source_lines": cold[0]["source_lines"],
        "repeat": repeat,
        "machine": machine.describe(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--repeat", type=int, default=3, help="cold and warm processes (3)")
    args = parser.parse_args()
    result = measure(args.repeat)
    if args.json:
        print(json.dumps(result))
        return
    print(f"trace and compile {GROUPS} groups, a fresh process each, median of {args.repeat}:")
    print(
        f"  cold   {result['cold_s']:.2f} s   (empty cache folder; Numba is imported and compiles)"
    )
    print(f"  warm   {result['warm_s']:.2f} s   (machine code from the cache folder)")
    print(f"  import {result['import_s']:.2f} s   (import stepgraph, after NumPy)")
    print(machine.line(result["machine"]))


if __name__ == "__main__":
    main()
