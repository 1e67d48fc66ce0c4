"""Named ranges for NVIDIA's profilers, in the NVTX domain "stepgraph".

    with ranges.range("stepgraph.replay"):
        ...

NVTX is loaded at the first range. With no profiler attached, or with STEPGRAPH_NVTX=0 in the
environment, a range costs a dictionary look-up and two empty calls. Names are registered with the
profiler once; `register` does that ahead of time for names known early. Names must be few and
fixed: each stays registered for the life of the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

DOMAIN = "stepgraph"

_lock = threading.Lock()
_domain: Any = None  # None: not asked yet; False: nobody listens


class Range:
    """A named range as a context manager; reusable, reentrant, and safe to share among threads
    (the stack of open ranges is NVTX's own, one per thread)."""

    __slots__ = ("_attributes", "_pop", "_push", "name")

    def __init__(self, name: str, domain: Any) -> None:
        self.name = name
        self._attributes = domain.get_event_attributes(message=name)
        self._push = domain.push_range
        self._pop = domain.pop_range

    def __enter__(self) -> None:
        self._push(self._attributes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pop()


class _NoRange:
    """Does nothing, twice as fast as with two Python methods: bound methods of a string are called
    without `self`, and both answer something false, so that no exception is swallowed."""

    __slots__ = ()
    __enter__ = "".isspace
    __exit__ = "".format


_NO_RANGE: Any = _NoRange()  # its methods are not functions, which mypy wants of a context manager


def _listener() -> Any:
    """The NVTX domain, or False when ranges would go nowhere. Settled once per process."""
    global _domain
    if _domain is None:
        with _lock:
            if _domain is None:
                _domain = _find_listener()
    return _domain


def _find_listener() -> Any:
    if os.environ.get("STEPGRAPH_NVTX", "").strip().lower() in ("0", "off", "false", "no"):
        return False
    try:
        import nvtx
    except ImportError:
        return False
    domain = nvtx.get_domain(DOMAIN)
    # What nvtx hands out when no tool is attached (or NVTX_DISABLE is set).
    return False if type(domain).__name__ == "DummyDomain" else domain


class _Ranges(dict[str, AbstractContextManager[object]]):
    def __missing__(self, name: str) -> AbstractContextManager[object]:
        domain = _listener()
        with _lock:
            if name not in self:
                self[name] = Range(name, domain) if domain else _NO_RANGE
        return self[name]


# The range called `name`, to be used with `with`. A dictionary's own method: no Python frame.
range: Callable[[str], AbstractContextManager[object]] = _Ranges().__getitem__


def register(*names: str) -> None:
    """Register names ahead of their first use."""
    for name in names:
        range(name)


def push(name: str) -> None:
    """Open a range on this thread, for `pop` to close. Prefer `with`, which cannot leak."""
    range(name).__enter__()


def pop() -> None:
    """Close the range that this thread opened last."""
    domain = _listener()
    if domain:
        domain.pop_range()


def enabled() -> bool:
    """Whether a profiler sees the ranges."""
    return bool(_listener())
