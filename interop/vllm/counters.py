"""What the shim did in this process, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """compiled: steps whose metadata the compiled step made. native: {reason: steps} left to
    vLLM. verified: compiled steps compared field by field with vLLM's; mismatches: those that
    differed. errors: exceptions of ours (each such step went to vLLM). attached: engines bound.
    recorded: steps written to a step file. compile_seconds: spent at engine start.
    status: "off", "waiting for vLLM", "installed", or why the shim stays out of the way."""

    status: str = "off"
    compiled: int = 0
    native: Counter[str] = field(default_factory=Counter)
    verified: int = 0
    mismatches: int = 0
    errors: int = 0
    attached: int = 0
    recorded: int = 0
    compile_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        values = dict(vars(self))
        values["native"] = dict(self.native)
        return values


COUNTERS = Counters()
