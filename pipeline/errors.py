"""Errors of tracing and compiling. Each message names the stage and the source line it is about."""

from __future__ import annotations


class StepGraphError(Exception):
    """Base of every error this package raises on purpose."""


class TraceError(StepGraphError):
    """A stage did something that cannot become part of a graph."""


class CompileError(StepGraphError):
    """A graph that cannot be compiled safely, e.g. an output that some replay would not write."""


class BindError(StepGraphError):
    """An array that cannot be bound to an input (shape, dtype, device, strides), or none bound."""


class CaptureError(StepGraphError):
    """An executable used with extents or addresses other than those it was captured for."""


class BlockTableError(StepGraphError, ValueError):
    """A block-table update that is refused: nothing of it was queued or written."""
