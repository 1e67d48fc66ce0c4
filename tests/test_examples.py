"""The examples run as a user runs them, and notice metadata that is wrong."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_owned_decode_loop(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "owned_decode_loop.py"), "--steps", "60"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    first, second = result.stdout.splitlines()
    words = first.split()
    assert words[:2] == ["60", "steps,"] and int(words[2]) > 1 and int(words[5]) > 100
    assert second.startswith("60 replays of ")


@pytest.mark.parametrize("group", ["full", "window", "state"])
def test_the_loop_notices_a_wrong_block(group: str) -> None:
    engine = load("owned_decode_loop").Engine(seed=0)
    for _ in range(40):
        engine.step()
    oldest = engine.running[0]
    # A column that the next step reads.
    column = {"full": 0, "window": max(oldest.computed - 20, 0) // 8, "state": 0}[group]
    engine.tables.block_table[group][oldest.row, column] = 255  # a block that no request has

    def ten_steps() -> None:
        for _ in range(10):
            engine.step()

    with pytest.raises(SystemExit, match=f"row {oldest.row}, .*: a wrong token"):
        ten_steps()
