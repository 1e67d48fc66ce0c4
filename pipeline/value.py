"""`Value`: an abstract array inside a step function. Its operators add nodes to the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from .errors import TraceError
from .ir import Aval, Dim, Extent, Use

if TYPE_CHECKING:
    from .trace import Step

Scalar: TypeAlias = "Value | int | bool"


class Value:
    """An abstract array inside a step function: has shape and dtype, no numbers."""

    __slots__ = ("step", "use")
    __array_priority__ = 1000

    def __init__(self, step: Step, use: Use) -> None:
        self.step = step
        self.use = use

    @property
    def aval(self) -> Aval:
        return self.use.aval

    @property
    def shape(self) -> tuple[Extent, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> str:
        return self.aval.dtype

    def __repr__(self) -> str:
        return f"<traced {self.aval}>"

    def _data_dependent(self, what: str) -> TraceError:
        return self.step.error(
            f"{what} needs the number behind the traced value {self.aval}, which exists only when "
            "the step runs; write select(condition, a, b) instead of `if`, min/max instead of "
            "Python's, and a symbolic dim instead of a loop over its elements"
        )

    def __bool__(self) -> bool:
        raise self._data_dependent("a Python condition")

    def __int__(self) -> int:
        raise self._data_dependent("int()")

    __index__ = __int__

    def __float__(self) -> float:
        raise self._data_dependent("float()")

    def __len__(self) -> int:
        raise self._data_dependent("len()")

    def __iter__(self) -> Iterator[Any]:
        raise self._data_dependent("iteration")

    def __contains__(self, item: object) -> bool:
        raise self._data_dependent("`in`")

    __hash__ = None  # type: ignore[assignment]

    def _op(self, name: str, *others: Any) -> Value:
        return self.step.apply(name, [self, *others])

    def __add__(self, other: Scalar) -> Value:
        return self._op("add", other)

    __radd__ = __add__

    def __sub__(self, other: Scalar) -> Value:
        return self._op("sub", other)

    def __rsub__(self, other: Scalar) -> Value:
        return self.step.apply("sub", [other, self])

    def __mul__(self, other: Scalar) -> Value:
        return self._op("mul", other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Scalar) -> Value:
        return self._op("floordiv", other)

    def __rfloordiv__(self, other: Scalar) -> Value:
        return self.step.apply("floordiv", [other, self])

    def __mod__(self, other: Scalar) -> Value:
        return self._op("mod", other)

    def __rmod__(self, other: Scalar) -> Value:
        return self.step.apply("mod", [other, self])

    def __truediv__(self, other: Scalar) -> Value:
        raise self.step.error("`/` gives fractions; metadata is integer: use `//`")

    def __neg__(self) -> Value:
        return self._op("neg")

    def __and__(self, other: Scalar) -> Value:
        return self._op("and", other)

    __rand__ = __and__

    def __or__(self, other: Scalar) -> Value:
        return self._op("or", other)

    __ror__ = __or__

    def __xor__(self, other: Scalar) -> Value:
        return self._op("xor", other)

    __rxor__ = __xor__

    def __invert__(self) -> Value:
        return self._op("not")

    def __lt__(self, other: Scalar) -> Value:
        return self._op("lt", other)

    def __le__(self, other: Scalar) -> Value:
        return self._op("le", other)

    def __gt__(self, other: Scalar) -> Value:
        return self._op("gt", other)

    def __ge__(self, other: Scalar) -> Value:
        return self._op("ge", other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return self._op("eq", other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return self._op("ne", other)

    def cast(self, dtype: str) -> Value:
        """The same numbers as `dtype` ("bool", "int32" or "int64"; to int32 wraps around)."""
        return self if dtype == self.dtype else self.step.apply("cast", [self], dtype=dtype)

    def expand(self, axis: int) -> Value:
        """A new dim of extent 1 at `axis` (0 or 1): (B,) -> (B, 1) or (1, B)."""
        if len(self.shape) != 1 or axis not in (0, 1):
            raise self.step.error(
                f"expand() takes one dim and axis 0 or 1, got {self.aval}, {axis}"
            )
        shape = (*self.shape, 1) if axis == 1 else (1, *self.shape)
        return self.step.apply("broadcast", [self], shape=shape, axes=(1 - axis,))

    def __getitem__(self, key: Any) -> Value:
        """x[i] with a Python int (-1 the last), or x[a:b] with ints: one-dim values only."""
        if len(self.shape) != 1:
            raise self.step.error(f"only one-dim values are indexed, not {self.aval}; use gather()")
        size = self.shape[0]
        if isinstance(key, slice) and key.step is None:
            start, stop = key.start or 0, key.stop
            if not isinstance(start, int) or start < 0 or not (stop is None or stop < 0):
                raise self.step.error("slices are x[a:] or x[a:-b] with a >= 0 and b > 0")
            extent = _shrink(size, start - (stop or 0))
            index = self.step.iota(extent) + start
        elif isinstance(key, int) and not isinstance(key, bool):
            index = self.step.constant(key) if key >= 0 else self.step.extent(size) + key
        else:
            raise self.step.error(f"index {key!r} is not an int or a slice; use gather()")
        return self.step.gather(self, [index])


def _shrink(size: Extent, by: int) -> Extent:
    if isinstance(size, (int, Dim)):
        return size - by
    raise TypeError("a per-group extent cannot be sliced")
