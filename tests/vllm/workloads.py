"""Scripted workloads: deterministic prompts, requests that join and leave at different steps."""

from __future__ import annotations

import random

from .engine import Request

VOCABULARY = 512


def prompt(seed: int, length: int, shared: int = 0) -> list[int]:
    """`length` token ids; the first `shared` are the same for every seed."""
    common = random.Random("shared prefix")
    own = random.Random(seed)
    head = [common.randrange(3, VOCABULARY) for _ in range(shared)]
    return head + [own.randrange(3, VOCABULARY) for _ in range(length - shared)]


def joining_and_leaving() -> list[Request]:
    """Eight requests of different lengths that overlap in changing sets; prompts stay within one
    recurrent block (vLLM's CPU kernels fail past it when prefix caching is on), decoding crosses
    blocks; some prompts share a prefix and one repeats an earlier prompt."""
    return [
        Request(prompt(1, 5), tokens=30),
        Request(prompt(2, 120), tokens=40),
        Request(prompt(3, 64, shared=48), tokens=12),
        Request(prompt(4, 90, shared=48), tokens=24, at=4),
        Request(prompt(5, 17), tokens=6, at=9),
        Request(prompt(6, 1), tokens=20, at=15),
        Request(prompt(4, 90, shared=48), tokens=16, at=30),
        Request(prompt(8, 126), tokens=10, at=31),
    ]
