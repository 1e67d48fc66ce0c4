"""`Executable`: one captured batch shape of a compiled step, and what it hands out."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from .errors import CaptureError
from .oracle import Key

InputKey: TypeAlias = "tuple[str, str | None]"


@dataclass
class Stats:
    """Counters of one compiled step."""

    compiles: int = 0
    disk_hits: int = 0
    captures: int = 0
    replays: int = 0
    evictions: int = 0
    rebinds: int = 0
    compile_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Outputs(Mapping[Key, np.ndarray]):
    """The outputs of one batch shape: views of the persistent buffers over the padded extent.

    out["seq_lens"], out["slot_mapping", "attn"]; `host(name)` reads a scalar as an int. The
    views of one batch shape are the same objects at each replay, with new contents.
    """

    def __init__(self, arrays: dict[Key, np.ndarray]) -> None:
        self._arrays = arrays

    def __getitem__(self, key: Key) -> np.ndarray:
        try:
            return self._arrays[key]
        except KeyError:
            names = sorted({k if isinstance(k, str) else f"{k[0]}[{k[1]}]" for k in self._arrays})
            raise KeyError(f"no output {key!r}; there are {', '.join(names)}") from None

    def __iter__(self) -> Iterator[Key]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def host(self, name: Key) -> int:
        value = self[name]
        if len(value.shape):
            raise KeyError(f"output {name!r} has shape {tuple(value.shape)}, it is no scalar")
        return int(value.item())


@dataclass(frozen=True, eq=False)
class Binding:
    """The arrays bound to device and state inputs, kept alive with every executable that uses them,
    and their addresses and strides."""

    arrays: dict[InputKey, Any]
    addresses: tuple[Any, ...]


class Executable:
    """One captured batch shape. `replay(*actual extents)` writes every output, padded.

    padded: {dim: padded extent}; outputs: what replay returns.
    """

    padded: dict[str, int]
    outputs: Outputs
    bound: Binding

    def replay(self, *extents: int) -> Outputs:
        """Run the step for the staged inputs and these actual extents (in the order of graph.dims).

        Raises CaptureError if an extent does not fit this shape, or an input was bound anew.
        """
        raise NotImplementedError


def wrong_extents(dims: Sequence[str], limits: Sequence[int], given: Sequence[int]) -> CaptureError:
    """The error for extents that do not fit a captured shape."""
    if len(given) != len(limits) or any(as_integer(n) is None for n in given):
        return CaptureError(f"integer extents of {tuple(dims)} are needed, got {tuple(given)}")
    k = next(k for k, limit in enumerate(limits) if not 0 <= given[k] <= limit)
    return CaptureError(f"{dims[k]}={given[k]} does not fit the captured extent {limits[k]}")


REBOUND = (
    "an input was bound to another array after this executable was captured; ask executable() for "
    "one with the new addresses"
)


def as_integer(value: Any) -> int | None:
    """A Python integer from anything that is one (NumPy's too, not bool); else None."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
