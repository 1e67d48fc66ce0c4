"""What a target's generator returns: text, and slots that say what its context holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from stepgraph.pipeline.passes.buffers import Buffer
from stepgraph.pipeline.passes.levels import Item


@dataclass(frozen=True)
class Staging:
    """Address of the staging buffer, whose header holds the actual extents."""


@dataclass(frozen=True)
class Padded:
    """The padded extent of a dim."""

    dim: str


@dataclass(frozen=True)
class Count:
    """A number of members."""

    n: int


@dataclass(frozen=True)
class Table:
    """Address of int64[n][2]: (address, row stride) of the member of `buffer` that each one
    reads."""

    buffer: Buffer
    members: tuple[int, ...]


@dataclass(frozen=True)
class Ints:
    """Address of int64[n][k]: static integers per member."""

    rows: tuple[tuple[int, ...], ...]


Slot: TypeAlias = "Staging | Padded | Count | Table | Ints"


@dataclass
class Source:
    """Generated text, what its context holds, the kernels it calls (name -> module:function), and
    for a device the levels that a launch chooses from."""

    text: str
    slots: list[Slot]
    kernels: dict[str, str]
    levels: list[list[Item]] = field(default_factory=list)
