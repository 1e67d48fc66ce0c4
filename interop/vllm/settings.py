"""What the user asked for: STEPGRAPH_VLLM and where files go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MODES = ("off", "on", "verify", "record")


@dataclass(frozen=True)
class Settings:
    """mode: one of MODES. every: in mode "verify", each how-many-th compiled step is compared.
    directory: where step files are written."""

    mode: str = "off"
    every: int = 1
    directory: Path = Path()


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """STEPGRAPH_VLLM=off|on|verify|verify:N|record, STEPGRAPH_VLLM_DIR=folder of step files.

    Raises ValueError, naming the accepted values, for anything else.
    """
    text = environ.get("STEPGRAPH_VLLM", "").strip().lower() or "off"
    mode, colon, every = text.partition(":")
    if mode not in MODES or (colon and mode != "verify"):
        raise ValueError(
            f"STEPGRAPH_VLLM={text!r} is not understood; use off, on, verify, verify:N or record"
        )
    if colon and not (every.isdecimal() and int(every) > 0):
        raise ValueError(f"STEPGRAPH_VLLM={text!r}: N in verify:N is a number of steps, at least 1")
    directory = Path(environ.get("STEPGRAPH_VLLM_DIR") or ".")
    return Settings(mode, int(every) if colon else 1, directory)
