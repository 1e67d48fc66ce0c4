"""What the build configuration promises about names and files."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import stepgraph

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("pipeline", "kernels", "interop", "profiling")


def test_version_is_the_installed_one() -> None:
    assert stepgraph.__version__ == metadata.version("stepgraph")


def test_py_typed_in_every_part() -> None:
    for part in ("stepgraph", *PARTS):
        assert (ROOT / part / "py.typed").is_file()


def test_every_folder_with_modules_is_a_package() -> None:
    # setup.py finds packages by their __init__.py; a folder without one would be left out.
    for part in ("stepgraph", *PARTS):
        folders = {path.parent for path in (ROOT / part).rglob("*.py")}
        assert [f for f in folders if not (f / "__init__.py").is_file()] == []


def test_plugin_entry_point_loads_and_is_callable() -> None:
    (entry,) = metadata.entry_points(group="vllm.general_plugins", name="stepgraph")
    assert callable(entry.load())


def test_import_loads_no_compiler_and_no_framework() -> None:
    code = (
        "import sys, stepgraph, stepgraph.interop.vllm\n"
        "heavy = {'numba', 'llvmlite', 'torch', 'vllm', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd="/")
