"""Ranges as a profiler sees them, through a small NVTX tool compiled here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).with_name("nvtx_tool.c")


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("nvtx") / "tool.so"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(TOOL)]
    subprocess.run(command, check=True, timeout=60)
    return library


def run(code: str, tool: Path | None, tmp_path: Path, **env: str) -> tuple[list[str], str]:
    """What the tool saw in the stepgraph domain, and what `code` printed, in a fresh process."""
    out = tmp_path / "events"
    out.write_text("")
    base = {k: v for k, v in os.environ.items() if not k.startswith(("NVTX_", "STEPGRAPH_"))}
    if tool is not None:
        base |= {"NVTX_INJECTION64_PATH": str(tool), "NVTX_TOOL_OUT": str(out)}
    code = "import sys\nfrom stepgraph.profiling import ranges\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=base | env,
        check=True,
        timeout=60,
        stdout=subprocess.PIPE,
        text=True,
    )
    events = [line for line in out.read_text().splitlines() if line.split()[1] == "stepgraph"]
    return events, done.stdout.strip()


NESTED = """
def work():
    with ranges.range("outer"):
        with ranges.range("inner"):
            raise KeyError
for _ in "ab":
    try:
        work()
    except KeyError:
        pass
ranges.push("by hand")
ranges.pop()
print(ranges.enabled())
"""


def test_ranges_nest_close_on_exceptions_and_register_once(tool: Path, tmp_path: Path) -> None:
    events, printed = run(NESTED, tool, tmp_path)
    assert printed == "True"
    twice = [
        "push stepgraph registered outer",
        "push stepgraph registered inner",
        "pop stepgraph",
        "pop stepgraph",
    ]
    pushed = [event for event in events if not event.startswith("register")]
    assert pushed == [*twice, *twice, "push stepgraph registered by hand", "pop stepgraph"]
    registered = [event for event in events if event.startswith("register")]
    assert registered == [f"register stepgraph {n}" for n in ("outer", "inner", "by hand")]


def test_names_can_be_registered_ahead(tool: Path, tmp_path: Path) -> None:
    events, _ = run('ranges.register("a", "b")\nwith ranges.range("a"): pass', tool, tmp_path)
    assert [event.split()[0] for event in events] == ["register", "register", "push", "pop"]


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_switched_off(tool: Path, tmp_path: Path, value: str) -> None:
    code = NESTED + "print('nvtx' in sys.modules)"
    events, printed = run(code, tool, tmp_path, STEPGRAPH_NVTX=value)
    assert events == []
    assert printed.split() == ["False", "False"]


def test_no_tool(tmp_path: Path) -> None:
    _, printed = run(NESTED, None, tmp_path)
    assert printed == "False"


def test_nvtx_missing(tmp_path: Path) -> None:
    _, printed = run("sys.modules['nvtx'] = None\n" + NESTED, None, tmp_path)
    assert printed == "False"


def test_nvtx_is_loaded_by_the_first_range_only(tmp_path: Path) -> None:
    loaded = "print('nvtx' in sys.modules)\n"
    _, printed = run(loaded + 'with ranges.range("a"): pass\n' + loaded, None, tmp_path)
    assert printed.split() == ["False", "True"]


def test_threads_have_their_own_stacks(tool: Path, tmp_path: Path) -> None:
    code = """
import threading
barrier = threading.Barrier(4)
def work(k):
    barrier.wait()
    for _ in range_(100):
        with ranges.range("shared"), ranges.range(f"own {k}"):
            pass
range_ = range
threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
"""
    events, _ = run(code, tool, tmp_path)
    assert sum(event.startswith("push") for event in events) == 800
    assert events.count("pop stepgraph") == 800
    assert sum(event.startswith("register") for event in events) == 5
