"""STEPGRAPH_VLLM and STEPGRAPH_VLLM_DIR."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepgraph.interop.vllm.settings import Settings, from_environment


@pytest.mark.parametrize(
    ("text", "mode", "every"),
    [
        (None, "off", 1),
        ("", "off", 1),
        (" OFF ", "off", 1),
        ("on", "on", 1),
        ("Verify", "verify", 1),
        ("verify:16", "verify", 16),
        ("record", "record", 1),
    ],
)
def test_modes(text: str | None, mode: str, every: int) -> None:
    environ = {} if text is None else {"STEPGRAPH_VLLM": text}
    assert from_environment(environ) == Settings(mode, every, Path())


@pytest.mark.parametrize(
    "text", ["1", "true", "verify:", "verify:0", "verify:-1", "verify:x", "on:2", "verify:1.5"]
)
def test_anything_else_names_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="STEPGRAPH_VLLM='"):
        from_environment({"STEPGRAPH_VLLM": text})


def test_the_folder_of_step_files() -> None:
    found = from_environment({"STEPGRAPH_VLLM": "record", "STEPGRAPH_VLLM_DIR": "/tmp/steps"})
    assert found.directory == Path("/tmp/steps")
