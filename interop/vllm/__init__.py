"""vLLM plugin (entry point group `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes. Does nothing yet."""
