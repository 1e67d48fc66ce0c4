"""A progress line on stderr, for commands that take more than a moment."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 28
REFRESH = 0.1  # seconds between two drawings of the bar


class Progress:
    """Shows one phase of a command at a time.

    enabled: None shows it when `stream` is a terminal. A stream that is no terminal gets a plain
        line every ten percent instead of a line that is drawn over.
    """

    def __init__(self, enabled: bool | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._enabled = self._terminal if enabled is None else enabled
        self._label, self._total, self._done = "", 0, 0
        self._drawn = 0.0
        self._shown = -1  # percent on the last plain line

    def note(self, text: str) -> None:
        """A phase whose length is not known (e.g. compiling)."""
        self._clear()
        self._label, self._total = text, 0
        self._put(f"{text} ...")

    def start(self, label: str, total: int) -> None:
        """A phase of `total` units."""
        self._clear()
        self._label, self._total, self._done = label, total, 0
        self._shown = -1
        self._draw()

    def advance(self, units: int = 1) -> None:
        """`units` more of the phase are done."""
        self._done += units
        now = time.monotonic()
        if self._enabled and (now - self._drawn >= REFRESH or self._done >= self._total):
            self._drawn = now
            self._draw()

    def close(self) -> None:
        """Take the line away."""
        self._clear()
        self._label, self._total = "", 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _draw(self) -> None:
        if not self._enabled:
            return
        share = min(self._done / self._total, 1.0) if self._total else 1.0
        if self._terminal:
            full = round(share * WIDTH)
            bar = "#" * full + "." * (WIDTH - full)
            self._put(f"{self._label:<34} [{bar}] {self._done}/{self._total}")
        elif (tenth := int(share * 10)) > self._shown:
            self._shown = tenth
            self._put(f"{self._label}: {self._done}/{self._total}")

    def _put(self, text: str) -> None:
        if self._enabled:
            start, end = ("\r\x1b[K", "") if self._terminal else ("", "\n")
            self._stream.write(start + text + end)
            self._stream.flush()

    def _clear(self) -> None:
        if self._enabled and self._terminal and self._label:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
