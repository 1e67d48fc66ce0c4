"""Where a target's buffers live: `Memory`, and NumPy's implementation of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .errors import BindError
from .ir import DTYPES


@dataclass(frozen=True)
class Layout:
    """What an array is: dtype name, shape, strides in elements, and whether it may be written."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writeable: bool = True


class Memory(Protocol):
    """Bytes of a target, and arrays in them (NumPy arrays, torch tensors, ...)."""

    def zeros(self, nbytes: int) -> Any:
        """Zeroed bytes that start at a cache line."""

    def view(self, raw: Any, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        """An array in `raw`, `offset` bytes behind its start."""

    def address(self, array: Any) -> int: ...

    def adopt(self, array: Any) -> Any:
        """A view of somebody's array, without a copy. Raises BindError if it is elsewhere."""

    def layout(self, array: Any) -> Layout: ...


class HostMemory:
    """NumPy arrays."""

    def zeros(self, nbytes: int) -> np.ndarray:
        raw = np.zeros(max(nbytes, 1) + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + max(nbytes, 1)]

    def view(self, raw: np.ndarray, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        of = DTYPES[dtype]
        nbytes = int(np.prod(shape, dtype=np.int64)) * of.itemsize
        return raw[offset : offset + nbytes].view(of).reshape(shape)

    def address(self, array: np.ndarray) -> int:
        return int(array.ctypes.data)

    def adopt(self, array: Any) -> np.ndarray:
        try:
            return array if isinstance(array, np.ndarray) else np.from_dlpack(array)
        except Exception as err:
            raise BindError(f"{type(array).__name__} has no CPU memory to bind: {err}") from None

    def layout(self, array: np.ndarray) -> Layout:
        item = array.dtype.itemsize
        # A stride of a part of an element is nothing that a step can follow: -1 stands for it.
        strides = tuple(s // item if s % item == 0 else -1 for s in array.strides)
        name = array.dtype.name + ("" if array.dtype.isnative else " (byte-swapped)")
        return Layout(name, array.shape, strides, bool(array.flags.writeable))
