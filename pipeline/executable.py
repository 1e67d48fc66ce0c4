"""`Executable`: one captured batch shape of a compiled step, and what it hands out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .errors import CaptureError
from .oracle import Key

if TYPE_CHECKING:
    from .compiled import Compiled

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
        return int(self[name].item())


class Executable:
    """One captured batch shape. `replay(*actual extents)` writes every output, padded."""

    def __init__(self, step: Compiled, padded: tuple[int, ...], bound: Binding) -> None:
        self.padded = dict(zip(step.graph.dims, padded, strict=True))
        self._step = step
        self._limits = padded
        self._bound = bound
        self._context, self._tables = step._context(self.padded, bound)
        self._address = self._context.ctypes.data
        self._call = step._native.call
        self._header = step._header
        self.outputs = Outputs(step._views(self.padded))

    def replay(self, *extents: int) -> Outputs:
        """Run the step for the staged inputs and these actual extents (in the order of graph.dims).

        Raises CaptureError if an extent does not fit this shape, or an input was bound anew.
        """
        step = self._step
        if step._bound is not self._bound:
            raise CaptureError(
                "an input was bound to another array after this executable was captured; ask "
                "executable() for one with the new addresses"
            )
        if len(extents) != len(self._limits):
            raise CaptureError(f"extents of {step.graph.dims} are needed, got {extents}")
        header = self._header
        for k, limit in enumerate(self._limits):
            if not 0 <= extents[k] <= limit:
                raise CaptureError(
                    f"{step.graph.dims[k]}={extents[k]} does not fit the captured extent {limit}"
                )
            header[k] = extents[k]
        self._call(self._address)
        step.stats.replays += 1
        return self.outputs


@dataclass(frozen=True, eq=False)
class Binding:
    """The arrays bound to device and state inputs, kept alive with every executable that uses
    them."""

    arrays: dict[InputKey, np.ndarray]

    def addresses(self) -> tuple[Any, ...]:
        return tuple((k, a.ctypes.data, a.strides) for k, a in sorted(self.arrays.items(), key=str))
