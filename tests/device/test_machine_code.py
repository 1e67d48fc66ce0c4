"""Every device target compiles for real architectures, without a GPU; registers, stack and shared
memory are printed, and a spill or an array in local memory fails.

Golden texts: the reference step in CUDA C++ and Triton, so that a change to a pass shows as a diff.
To accept one: STEPGRAPH_GOLDEN=write python -m pytest tests/device/test_machine_code.py
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stepgraph as sg
from stepgraph import stages
from stepgraph.pipeline import passes
from stepgraph.pipeline.lower import cuda_c, numba_cuda, triton_tiles
from stepgraph.pipeline.lower.source import Source
from stepgraph.pipeline.passes.buffers import Plan, assign_buffers
from stepgraph.pipeline.passes.fusion import fusion

ARCHITECTURES = (80, 90, 100)
GOLDEN = Path(__file__).parent / "golden"
TABLE: list[tuple[str, int, dict[str, int]]] = []


def reference_step(s: sg.Step) -> None:
    """Updates, then all that a granite-shaped step has, and the primitives it has not."""
    tables = stages.update_tables(s, 256)
    fields = stages.batch(s)
    s.output("query_start_loc", fields.query_start_loc)
    s.output("seq_lens", fields.seq_lens)
    s.output("positions", fields.positions)
    s.output("found", sg.compact(fields.seq_lens > 1, -1), pad=-1)
    s.output("least", sg.reduce_min(fields.seq_lens), pad=0)
    for g in s.groups:
        if g.kind == "recurrent":
            g.output("state_indices", stages.state_indices(tables[g.name], fields))
            g.skip("slot_mapping")
            g.skip("block_table")
        else:
            g.output("slot_mapping", stages.slot_mapping(tables[g.name], fields))
            g.output("block_table", stages.block_table(tables[g.name], fields.rows))
            g.skip("state_indices")


def reference_plan() -> Plan:
    groups = [
        sg.Group("attention", block_size=16, max_blocks=512)
        if i == 9
        else sg.Group(f"recurrent {i}", "recurrent", 128, 64, cache_mode="align")
        for i in range(10)
    ]
    graph = passes.run(sg.trace(reference_step, groups), None)
    capacity = {"B": 256, "T": 8192, "U": 512, "N": 4096}
    return assign_buffers(fusion(graph, device=True), capacity)


def dumper() -> str | None:
    """cuobjdump, on the path or in Triton's wheel."""
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("triton")
    if found is None and spec is not None and spec.origin is not None:
        inside = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        found = str(inside) if inside.exists() else None
    return found


def usage(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers, stack, local and static shared memory of the step's kernel, in bytes."""
    tool = dumper()
    if tool is None:
        pytest.skip("there is no cuobjdump to read machine code with")
    file = folder / "step.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([tool, "-res-usage", str(file)], capture_output=True, text=True).stdout
    rows = re.findall(r"Function (\S*stepgraph_step\S*):\s*\n\s*(.*)", text)
    assert len(rows) == 1, text
    return {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", rows[0][1])}


def by_nvrtc(source: Source, architecture: int) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=f"sm_{architecture}", std="c++17")
    return bytes(Program(source.text, "c++", options).compile("cubin").code)


def by_numba(source: Source, architecture: int) -> bytes:
    import numba.cuda.dispatcher as dispatcher
    from cuda.core import Program, ProgramOptions
    from numba import cuda, types

    from stepgraph.pipeline.cuda.numba_cuda import function

    capability = (architecture // 10, architecture % 10)
    # Functions that a kernel calls are compiled for "the current device", and there is none.
    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        signature = (types.int64, types.int32, types.int32)
        # Compiled before for another architecture, those functions would be taken as they are.
        ptx, _ = cuda.compile(
            fresh(function(source)),
            signature,
            cc=capability,
            device=False,
            output="ptx",
            abi="numba",
        )
    finally:
        dispatcher.get_current_device = real
    options = ProgramOptions(arch=f"sm_{architecture}")
    return bytes(Program(ptx, "ptx", options).compile("cubin").code)


def fresh(step: Any) -> Any:
    """The functions that a step calls forget what they were compiled for."""
    work, seen = [step.__globals__], set()
    while work:
        for value in list(work.pop().values()):
            if hasattr(value, "overloads") and id(value) not in seen:
                seen.add(id(value))
                value.overloads.clear()
                work.append(value.py_func.__globals__)
    return step


def by_triton(source: Source, architecture: int) -> bytes:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from stepgraph.pipeline.cuda.triton import OPTIONS, function

    signature = {"ctx": "i64", "first": "i32", "last": "i32"}
    compiled = triton.compile(
        ASTSource(fn=function(source), signature=signature, constexprs={}),
        target=GPUTarget("cuda", architecture, 32),
        options=OPTIONS,
    )
    return bytes(compiled.asm["cubin"])


Compiler = Callable[[Source, int], bytes]
COMPILERS: dict[str, tuple[Callable[[Plan], Source], Compiler, str]] = {
    "cuda": (cuda_c.generate, by_nvrtc, "cuda.core"),
    "numba-cuda": (numba_cuda.generate, by_numba, "numba_cuda"),
    "triton": (triton_tiles.generate, by_triton, "triton"),
}


def there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("target", COMPILERS)
def test_no_spills(target: str, architecture: int, tmp_path: Path) -> None:
    generate, compiler, module = COMPILERS[target]
    if not there(module):
        pytest.skip(f"{target}: {module} is not installed")
    for switch in ("NUMBA_ENABLE_CUDASIM", "TRITON_INTERPRET"):
        if os.environ.get(switch) == "1":
            pytest.skip(f"{switch} is set: nothing is compiled")
    used = usage(compiler(generate(reference_plan()), architecture), tmp_path)
    TABLE.append((target, architecture, used))
    assert used["STACK"] == 0, used
    assert used["LOCAL"] == 0, used
    assert used["SHARED"] <= 48 << 10, used


@pytest.fixture(scope="module", autouse=True)
def _print_table(request: pytest.FixtureRequest) -> Any:
    yield
    if TABLE:
        lines = [f"{'target':12}{'sm':>5}{'registers':>11}{'stack':>7}{'local':>7}{'shared':>8}"]
        lines += [
            f"{t:12}{a:>5}{u['REG']:>11}{u['STACK']:>7}{u['LOCAL']:>7}{u['SHARED']:>8}"
            for t, a, u in TABLE
        ]
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print("\n" + "\n".join(lines))


@pytest.mark.parametrize(
    ("file", "generate", "begins"),
    [
        ("step.cu", cuda_c.generate, 'extern "C"'),
        ("step_triton.py.txt", triton_tiles.generate, "@triton.jit"),
    ],
)
def test_golden_text(file: str, generate: Callable[[Plan], Source], begins: str) -> None:
    text = generate(reference_plan()).text
    text = text[text.index(begins) :]
    path = GOLDEN / file
    if os.environ.get("STEPGRAPH_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), (
        "the generated text of the reference step has changed: see this file's head"
    )
