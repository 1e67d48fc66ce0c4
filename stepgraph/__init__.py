"""stepgraph: compiles the per-step attention metadata of an LLM engine into one replayable step."""

from stepgraph._version import __version__

__all__ = ["__version__"]
