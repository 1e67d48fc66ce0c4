"""Binding, buckets, the executable cache, and code kept on disk."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.pipeline.lower import native

GROUPS = [sg.Group(f"m{i}", "recurrent", 4, 6, cache_mode="align") for i in range(3)]


def step(s: sg.Step) -> None:
    b = s.dim("B")
    lens = s.input("lens", (b,))
    s.output("seq_lens", lens)
    for g in s.groups:
        table = g.input("block_table", (8, 6), kind="device")
        g.output("state_indices", sg.gather(table, s.iota(b), sg.maximum(lens - 1, 0) // 4))


def tables(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {g.name: rng.integers(1, 99, (8, 6)).astype(np.int32) for g in GROUPS}


@pytest.fixture
def compiled() -> sg.Compiled:
    c = sg.compile(sg.trace(step, GROUPS), {"B": 8})
    c.bind("block_table", tables())
    return c


def test_outputs_keep_their_addresses_at_every_shape(compiled: sg.Compiled) -> None:
    """SGLang 26019: metadata rebuilt as fresh tensors while the graph read the captured ones."""
    seen = set()
    for lens in ([5, 6], [6, 7], [1] * 8, [2], []):
        out = compiled(B=len(lens), lens=np.array(lens, np.int32))
        garbage = [np.empty(8, np.int32) for _ in range(100)]
        seen.add((out["seq_lens"].ctypes.data, out["state_indices", "m2"].ctypes.data))
        assert out["seq_lens"][: len(lens)].tolist() == lens
        del garbage
    assert len(seen) == 1


def test_buckets_round_up_and_compile_once(compiled: sg.Compiled) -> None:
    """vllm-ascend 16629: changing integers specialised the kernel in the middle of serving."""
    before = compiled.stats.compiles + compiled.stats.disk_hits
    rng = np.random.default_rng(1)
    for _ in range(500):
        n = int(rng.integers(0, 9))
        compiled(B=n, lens=rng.integers(1, 24, n).astype(np.int32))
    assert compiled.buckets == {"B": [1, 2, 4, 8]}
    assert compiled.stats.captures == 4
    assert compiled.stats.compiles + compiled.stats.disk_hits == before
    assert compiled.stats.replays == 500
    assert compiled.bucket(B=3) == {"B": 4}


def test_own_buckets_and_their_limits() -> None:
    graph = sg.trace(step, GROUPS)
    c = sg.compile(graph, {"B": 8}, buckets={"B": [3, 8]})
    c.bind("block_table", tables())
    assert c(B=1, lens=[4])["seq_lens"].tolist() == [4, 0, 0]
    with pytest.raises(sg.CompileError, match=r"buckets of B must be 1\.\.8"):
        sg.compile(graph, {"B": 8}, buckets={"B": [16]})


def test_above_the_capacity_is_an_error_and_changes_nothing(compiled: sg.Compiled) -> None:
    out = compiled(B=2, lens=[5, 6])
    with pytest.raises(sg.CaptureError, match="B=9 is above the capacity 8"):
        compiled(B=9, lens=np.zeros(9, np.int32))
    with pytest.raises(sg.CaptureError, match="B=-1"):
        compiled(B=-1)
    assert out["seq_lens"].tolist() == [5, 6]
    exe = compiled.executable(B=4)
    with pytest.raises(sg.CaptureError, match="B=5 does not fit the captured extent 4"):
        exe.replay(5)
    with pytest.raises(sg.CaptureError, match="extents of"):
        exe.replay()


def test_missing_and_wrong_arguments(compiled: sg.Compiled) -> None:
    with pytest.raises(sg.CaptureError, match="actual extent of B is missing"):
        compiled(lens=[1])
    with pytest.raises(sg.BindError, match=r"no host input 'length'; there are \['lens'\]"):
        compiled(B=1, length=[1])
    with pytest.raises(sg.BindError, match="staging holds"):
        compiled(B=1, lens=np.zeros(9, np.int32))
    with pytest.raises(sg.BindError, match="float64, the graph wants int32"):
        compiled(B=1, lens=[1.5])
    with pytest.raises(sg.BindError, match="int64, the graph wants int32"):
        compiled(B=1, lens=np.array([2**40]))
    assert compiled(B=1, lens=np.array([7], np.int64))["seq_lens"].tolist() == [7]
    with pytest.raises(KeyError, match="no output 'slots'; there are seq_lens, state_indices"):
        compiled(B=1)["slots"]
    with pytest.raises(sg.CompileError, match=r"capacity of \['B'\] is missing"):
        sg.compile(sg.trace(step, GROUPS), {})
    with pytest.raises(sg.CompileError, match="capacity names"):
        sg.compile(sg.trace(step, GROUPS), {"B": 8, "Q": 3})
    with pytest.raises(sg.CompileError, match="no target 'tpu'"):
        sg.compile(sg.trace(step, GROUPS), {"B": 8}, target="tpu")


def test_an_input_never_bound_is_named() -> None:
    c = sg.compile(sg.trace(step, GROUPS), {"B": 8})
    c.bind("block_table", {"m1": tables()["m1"]})
    with pytest.raises(sg.BindError, match=r"never bound: block_table\[m0\], block_table\[m2\]"):
        c(B=1, lens=[1])


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros((8, 6), np.int64), "is int64, the graph wants int32"),
        (np.zeros((7, 6), np.int32), r"shape \(7, 6\), the step reads up to \(8, 6\)"),
        (np.zeros(48, np.int32), "shape"),
        (np.zeros((6, 8), np.int32).T, "rows must be contiguous"),
        ("text", "has no CPU memory to bind"),
    ],
)
def test_arrays_that_cannot_be_bound(compiled: sg.Compiled, array: Any, says: str) -> None:
    with pytest.raises(sg.BindError, match=says):
        compiled.bind("block_table", {"m0": array})
    with pytest.raises(sg.BindError, match="no device or state input 'tables'"):
        compiled.bind("tables", array)


def test_rows_may_have_a_stride(compiled: sg.Compiled) -> None:
    wide = np.zeros((8, 10), np.int32)
    wide[:, :6] = tables(3)["m0"]
    compiled.bind("block_table", {"m0": wide[:, :6]})
    out = compiled(B=2, lens=[1, 9])
    assert out["state_indices", "m0"].tolist() == [wide[0, 0], wide[1, 2]]


def test_the_stride_of_a_single_column_says_nothing() -> None:
    """NumPy and PyTorch give a dim of extent 1 any stride."""

    def first(s: sg.Step) -> None:
        table = s.input("table", (4, 1), kind="device")
        s.output("first", sg.gather(table, s.iota(s.dim("B")), s.constant(0)), pad=0)

    c = sg.compile(sg.trace(first), {"B": 4})
    wide = np.arange(12, dtype=np.int32).reshape(4, 3)
    for column, want in (
        (np.arange(4, 8, dtype=np.int32)[:, None], [4, 5, 6, 7]),
        (wide[:, 1:2], [1, 4, 7, 10]),
        (wide[:, ::3], [0, 3, 6, 9]),
    ):
        c.bind("table", column)
        assert c(B=4)["first"].tolist() == want


def test_a_state_must_be_writable() -> None:
    def update(s: sg.Step) -> None:
        state = s.input("state", (4,), kind="state")
        s.update(state, sg.scatter(state, 1, s.iota(s.dim("B"))))

    c = sg.compile(sg.trace(update), {"B": 4})
    frozen = np.zeros(4, np.int32)
    frozen.flags.writeable = False
    with pytest.raises(sg.BindError, match="read-only"):
        c.bind("state", frozen)


def test_state_read_before_its_update_is_refused() -> None:
    def update(s: sg.Step) -> None:
        state = s.input("state", (4,), kind="state")
        s.output("old", sg.gather(state, s.iota(s.dim("B"))), pad=0)
        s.update(state, sg.scatter(state, 1, s.iota(s.dim("B"))))

    with pytest.raises(sg.CompileError, match="its old value is also read"):
        sg.compile(sg.trace(update), {"B": 4})


def test_state_updated_by_a_copy_is_refused() -> None:
    def update(s: sg.Step) -> None:
        state = s.input("state", (4,), kind="state")
        s.update(state, s.iota(4))

    with pytest.raises(sg.CompileError, match="must be updated by scatter"):
        sg.compile(sg.trace(update), {})


def test_a_rebound_input_makes_a_held_executable_refuse(compiled: sg.Compiled) -> None:
    exe = compiled.executable(B=2)
    compiled.inputs["lens"][:2] = [5, 6]
    exe.replay(2)
    other = tables(9)
    compiled.bind("block_table", other)
    with pytest.raises(sg.CaptureError, match="bound to another array after"):
        exe.replay(2)
    out = compiled(B=2, lens=[5, 6])
    assert out["state_indices", "m0"].tolist() == [other["m0"][0, 1], other["m0"][1, 1]]
    assert compiled.stats.rebinds == 1


def test_two_inputs_alternated_are_captured_twice(compiled: sg.Compiled) -> None:
    """PyTorch 129349: a graph specialised by pointer re-recorded without end."""
    both = tables(1), tables(2)
    before = compiled.stats.captures
    for i in range(1000):
        compiled.bind("block_table", both[i % 2])
        out = compiled(B=1, lens=[5])
        assert out["state_indices", "m1"].tolist() == [both[i % 2]["m1"][0, 1]]
    assert compiled.stats.captures - before == 2


def test_the_array_bound_outlives_its_name(compiled: sg.Compiled) -> None:
    """cutile-python 88: imported memory was released while a launch still needed it."""
    compiled.bind("block_table", {name: t.copy() for name, t in tables(4).items()})
    garbage = [np.full((8, 6), -1, np.int32) for _ in range(100)]
    out = compiled(B=1, lens=[5])
    assert out["state_indices", "m0"].tolist() == [tables(4)["m0"][0, 1]]
    assert len(garbage) == 100


def test_least_recently_used_executables_go_first() -> None:
    c = sg.compile(sg.trace(step, GROUPS), {"B": 8}, max_executables=2)
    c.bind("block_table", tables())
    one, two = c.executable(B=1), c.executable(B=2)
    assert c.executable(B=1) is one
    c.executable(B=4)
    assert c.stats.evictions == 1
    assert c.executable(B=1) is one
    assert c.executable(B=2) is not two


def test_capture_order_does_not_matter() -> None:
    """vLLM 48261: after capturing large to small, the shared buffers described the smallest."""

    def starts(s: sg.Step) -> None:
        s.output("query_start_loc", sg.cumsum(s.input("n", (s.dim("B"),)), "offsets"))

    c = sg.compile(sg.trace(starts), {"B": 4})
    for size in (4, 2, 1):
        c(B=size, n=[1] * size)
    assert c(B=4, n=[1] * 4)["query_start_loc"].tolist() == [0, 1, 2, 3, 4]


def test_a_new_group_layout_is_a_new_plan() -> None:
    """vLLM 54044: three tables expected, four arrived, after profiling."""
    for n in (3, 4):
        groups = [sg.Group(f"m{i}", "recurrent", 4, 6) for i in range(n)]
        c = sg.compile(sg.trace(step, groups), {"B": 8})
        given = {g.name: np.full((8, 6), i + 1, np.int32) for i, g in enumerate(groups)}
        c.bind("block_table", given)
        out = c(B=1, lens=[1])
        assert [out["state_indices", g.name].item() for g in groups] == list(range(1, n + 1))
        with pytest.raises(sg.BindError, match="no device or state input"):
            c.bind("block_table", {"m4": given["m0"]})


def test_threads_see_whole_steps(compiled: sg.Compiled) -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            n = int(rng.integers(1, 9))
            lens = rng.integers(1, 24, n).astype(np.int32)
            with lock:
                out = compiled(B=n, lens=lens)
                if out["seq_lens"][:n].tolist() != lens.tolist():
                    wrong.append(lens)
            compiled.executable(B=int(rng.integers(1, 9)))

    lock = threading.Lock()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert compiled.stats.captures == 8


def test_memory_is_bounded_by_the_outputs(compiled: sg.Compiled) -> None:
    assert compiled.total_bytes <= 2 * compiled.output_bytes


WARM = """
import sys, numpy as np
sys.path.insert(0, {tests!r})
from tests.pipeline.test_compiled import GROUPS, step, tables
import stepgraph as sg
c = sg.compile(sg.trace(step, GROUPS), {{"B": 8}})
c.bind("block_table", tables())
out = c(B=2, lens=[5, 6])
assert out["seq_lens"].tolist() == [5, 6], out["seq_lens"]
assert out["state_indices", "m0"].tolist() == [tables()["m0"][0, 1], tables()["m0"][1, 1]]
print(c.stats.compiles, c.stats.disk_hits, "numba" in sys.modules)
"""


def in_new_process(cache: Path) -> str:
    root = str(Path(__file__).parents[2])
    env = {"STEPGRAPH_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", WARM.format(tests=root)],
        env=env,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_second_process_starts_from_disk_without_numba(tmp_path: Path) -> None:
    assert in_new_process(tmp_path / "cache") == "1 0 True"
    assert in_new_process(tmp_path / "cache") == "0 1 False"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other", "pickle"])
def test_a_damaged_cache_entry_is_compiled_anew(tmp_path: Path, damage: str) -> None:
    in_new_process(tmp_path)
    (entry,) = tmp_path.glob("*.sgo")
    good = entry.read_bytes()
    bad = {
        "cut": good[:-100],
        "flipped": good[:-50] + bytes([good[-50] ^ 1]) + good[-49:],
        "empty": b"",
        "other": b"not an object",
        "pickle": b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.",
    }[damage]
    entry.write_bytes(bad)
    assert in_new_process(tmp_path) == "1 0 True"
    assert entry.read_bytes() == good
    assert in_new_process(tmp_path) == "0 1 False"


def test_no_cache_directory_still_works(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert in_new_process(blocked / "below") == "1 0 True"


def test_an_empty_cache_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGRAPH_CACHE_DIR", "")
    assert native.cache_directory() is None
