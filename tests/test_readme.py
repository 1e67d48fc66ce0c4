"""The README's code runs, and its commands and paths are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepgraph.cli import parser

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_there_is_code() -> None:
    assert len(BLOCKS) >= 1


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_code_runs(block: int) -> None:
    exec(compile(BLOCKS[block], "README.md", "exec"), {"__name__": "readme"})


def test_commands_exist() -> None:
    commands = set(re.findall(r"`stepgraph ((?:[a-z]+ ?)+)", README))
    assert {"demo", "replay ", "bench vllm "} <= commands
    for command in commands:
        words = command.split()
        if words[0] == "replay":
            words.append("FILE")
        if words[0] == "bench":
            words += ["--model", "DIR"]
        assert callable(parser().parse_args(words).run)


def test_paths_exist() -> None:
    paths = re.findall(r"\]\(([^):]+)\)", README)
    paths += re.findall(r"`([a-z]+/)`", README) + re.findall(r"python (benchmarks/\S+\.py)", README)
    assert len(paths) > 8
    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_the_commands_that_ci_runs_are_marked() -> None:
    for mark, end in (("demo", "stepgraph demo"), ("tests", "-m pytest")):
        (line,) = re.findall(rf"<!-- {mark} -->\n```bash\n(.*)\n```", README)
        assert line.startswith("python3 -m venv ") and line.endswith(end)
