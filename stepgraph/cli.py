"""Command line: `stepgraph` and `python -m stepgraph`."""

from __future__ import annotations


def main() -> int:
    raise SystemExit("stepgraph: no command is available yet")
