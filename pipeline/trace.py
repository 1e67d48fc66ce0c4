"""Tracing: a step function runs once over abstract values, and what it does becomes a graph.

    def step(s):
        B = s.dim("B")
        computed = s.input("num_computed_tokens", (B,))
        scheduled = s.input("num_scheduled_tokens", (B,))
        s.output("seq_lens", computed + scheduled, pad=0)

    print(trace(step))
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union

from .errors import TraceError
from .groups import Group
from .ir import DTYPES, Aval, Dim, Extent, Graph, Lit, Node, Operand, Output, Source, Use
from .primitives import PRIMITIVES

_HERE = str(Path(__file__).parent)
INT_RANGE = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "bool": (0, 1)}

Scalar = Union["Value", int, bool]


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
            raise self.step.error(f"expand() takes one dim and axis 0 or 1, got {self.aval}, {axis}")
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
        return gather(self, index)


def _shrink(size: Extent, by: int) -> Extent:
    if isinstance(size, (int, Dim)):
        return size - by
    raise TypeError("a per-group extent cannot be sliced")


class Step:
    """The tracing context that a step function receives: declares dims, inputs and outputs."""

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []
        self.groups = tuple(GroupStep(self, group) for group in groups)
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise TraceError(f"group names must differ, got {names}")
        self._dims: dict[str, Dim] = {}
        self._names: dict[tuple[str, str, str | None], Source] = {}
        self._stages: list[tuple[str, str]] = []

    # -- declarations

    def dim(self, name: str) -> Dim:
        """The symbolic dim `name` (the same one each time it is asked for)."""
        if not name.isidentifier():
            raise self.error(f"a dim needs an identifier as its name, got {name!r}")
        return self._dims.setdefault(name, Dim(name))

    def input(
        self,
        name: str,
        shape: Sequence[Extent] = (),
        dtype: str = "int32",
        *,
        kind: str = "host",
        unit: str | None = None,
        axes: Sequence[str | None] | None = None,
        group: str | None = None,
    ) -> Value:
        """Declare an input.

        kind: "host" (staged with the step's other host inputs in one copy), "device" (bound by
        address, read only) or "state" (bound by address, updated in place by `update`).
        unit: what its numbers identify ("row", "block", ...); axes: what an index of each of its
        dims must count. An id of one kind used where another is meant is then a TraceError.
        """
        if kind not in ("host", "device", "state"):
            raise self.error(f"input {name!r}: kind must be host, device or state, got {kind!r}")
        if dtype not in DTYPES:
            raise self.error(f"input {name!r}: dtype must be one of {sorted(DTYPES)}")
        if len(shape) > 2:
            raise self.error(f"input {name!r}: at most two dims, got {len(shape)}")
        for size in shape:
            if isinstance(size, int) and size < 1:
                raise self.error(f"input {name!r}: extents must be at least 1, got {size}")
        self._claim("input", name, group)
        aval = Aval(tuple(shape), dtype, unit)
        params = {
            "name": name,
            "kind": kind,
            "aval": aval,
            "axes": tuple(axes) if axes is not None else (None,) * len(shape),
            "groups": None if group is None else (group,),
        }
        return self._node("input", [], params)

    def output(
        self,
        name: str,
        value: Scalar,
        *,
        pad: Scalar | None = None,
        host: bool = False,
        group: str | None = None,
    ) -> None:
        """Declare a persistent output. `pad` fills it past the actual extent: a constant or a traced
        scalar; None takes the padding contract's value for the field `name`."""
        value = self.lift(value)
        self._claim("output", name, group)
        if pad is None:
            pad = self._contract(name, value)
        if isinstance(pad, Value):
            if pad.shape:
                raise self.error(f"output {name!r}: the pad must be a scalar, got {pad.aval}")
            if pad.dtype != value.dtype:
                raise self.error(f"output {name!r} is {value.dtype}, its pad {pad.dtype}")
        pad_op: Operand = pad.use if isinstance(pad, Value) else self._literal(pad, value.dtype)
        groups = None if group is None else (group,)
        self.outputs.append(Output(name, groups, value.use, pad_op, self.source(), host))

    def update(self, state: Value, value: Value) -> None:
        """Write `value` back to the input `state` (kind "state"), in place."""
        node = state.use.node
        if node.prim != "input" or node.param("kind") != "state":
            raise self.error("update() needs an input declared with kind='state'")
        if value.aval.shape != state.aval.shape or value.dtype != state.dtype:
            raise self.error(f"update() of {state.aval} with {value.aval}")
        name, groups = node.param("name"), node.param("groups")
        self._claim("update", name, groups and groups[0])
        self.outputs.append(
            Output(name, groups, value.use, Lit(0, value.dtype), self.source(), updates=name)
        )

    # -- values

    def constant(self, value: int, dtype: str = "int32") -> Value:
        """A scalar constant."""
        literal = self._literal(value, dtype)
        return self._node("broadcast", [literal], {"shape": (), "axes": ()})

    def iota(self, size: Extent, dtype: str = "int32") -> Value:
        """0, 1, 2, ... along one dim."""
        return self._node("iota", [], {"shape": (size,), "dtype": dtype})

    def extent(self, size: Extent, dtype: str = "int32") -> Value:
        """The actual extent of a dim (e.g. the number of requests), as a scalar."""
        return self._node("extent", [], {"size": size, "dtype": dtype})

    def lift(self, x: Scalar, dtype: str = "int32") -> Value:
        """A traced value from a Python number."""
        if isinstance(x, Value):
            if x.step is not self:
                raise self.error("a value of another trace was used; pass it in as an input")
            return x
        if isinstance(x, bool):
            return self.constant(int(x), "bool")
        if isinstance(x, int):
            return self.constant(x, dtype)
        raise self.error(f"expected a traced value or an int, got {type(x).__name__}")

    def apply(self, prim: str, args: Sequence[Any], **params: Any) -> Value:
        """Apply a primitive: lifts Python numbers, broadcasts dims of extent 1 and scalars."""
        values = [a for a in args if isinstance(a, Value)]
        for value in values:
            self.lift(value)
        dtype = next((v.dtype for v in values if v.dtype != "bool"), None)
        dtype = dtype or (values[0].dtype if values else "int32")
        operands: list[Any] = []
        for a in args:
            if isinstance(a, Value):
                operands.append(a)
            elif isinstance(a, (int, bool)):
                operands.append(self._literal(a, "bool" if isinstance(a, bool) else dtype))
            else:
                raise self.error(f"{prim}: expected a traced value or int, got {type(a).__name__}")
        if PRIMITIVES[prim].loop == "elementwise" and prim not in ("broadcast", "gather", "iota"):
            operands = self._broadcast_together(operands)
        return self._node(prim, operands, params)

    def _broadcast_together(self, operands: list[Any]) -> list[Any]:
        rank2 = [o for o in operands if isinstance(o, Value) and len(o.shape) == 2]
        if not rank2:
            return operands
        shape: list[Extent] = [1, 1]
        for o in rank2:
            for axis, size in enumerate(o.shape):
                if size != 1:
                    if shape[axis] not in (1, size):
                        raise self.error(
                            f"shapes differ: {', '.join(str(v.aval) for v in rank2)}"
                        )
                    shape[axis] = size
        target = tuple(shape)
        return [
            self.apply("broadcast", [o], shape=target, axes=(0, 1))
            if isinstance(o, Value) and len(o.shape) == 2 and o.shape != target
            else o
            for o in operands
        ]

    def _literal(self, value: Any, dtype: str) -> Lit:
        if isinstance(value, bool):
            value = int(value)
        if not isinstance(value, int):
            raise self.error(f"expected an int, got {type(value).__name__}")
        low, high = INT_RANGE[dtype]
        if not low <= value <= high:
            raise self.error(f"{value} does not fit {dtype}; cast() the other operand to int64")
        return Lit(value, dtype)

    def _node(self, prim: str, args: Sequence[Any], params: dict[str, Any]) -> Value:
        return self.nodes_of(prim, args, params)[0]

    def nodes_of(self, prim: str, args: Sequence[Any], params: dict[str, Any]) -> list[Value]:
        """Add one node; a Value per result."""
        operands = tuple(a.use if isinstance(a, Value) else a for a in args)
        avals = [op.aval if isinstance(op, Use) else Aval((), op.dtype) for op in operands]
        try:
            results = PRIMITIVES[prim].rule(avals, params)
        except TypeError as err:
            raise self.error(f"{prim}: {err}") from None
        node = Node(prim, operands, tuple(sorted(params.items())), results, self.source())
        self.nodes.append(node)
        return [Value(self, Use(node, i)) for i in range(len(results))]

    # -- where we are

    def source(self) -> Source:
        line = _user_line()
        if not self._stages:
            return Source(line=line)
        return Source(self._stages[-1][0], line, self._stages[0][1])

    def error(self, text: str) -> TraceError:
        return TraceError(f"{text}\n  {self.source()}")

    def _claim(self, what: str, name: str, group: str | None) -> None:
        if not isinstance(name, str) or not name:
            raise self.error(f"an {what} needs a non-empty name, got {name!r}")
        label = name if group is None else f"{name}[{group}]"
        clash = self._names.get((what, name, group)) or self._names.get((what, name, None))
        if clash is None and group is None:
            clash = next((s for (w, n, _), s in self._names.items() if (w, n) == (what, name)), None)
        if clash is not None:
            raise self.error(f"{what} {label!r} is declared twice; the first is {clash}")
        self._names[what, name, group] = self.source()

    def _contract(self, name: str, value: Value) -> Scalar:
        from .padding import PADDING, REPEAT_LAST

        if name not in PADDING:
            raise self.error(
                f"output {name!r} is not a field of the padding contract: say pad=... "
                "(what rows or tokens past the actual extent hold)"
            )
        pad = PADDING[name].pad
        if pad == REPEAT_LAST:
            return value[-1]
        return int(pad)

    def finish(self) -> Graph:
        """The graph; checks that what one group of a kind writes, all groups of that kind write."""
        if not self.outputs:
            raise TraceError("the step function declared no output")
        fields: dict[str, set[str]] = {}
        for out in self.outputs:
            if out.groups is not None and out.updates is None:
                fields.setdefault(out.name, set()).add(out.groups[0])
        kinds = {g.name: g.spec.kind for g in self.groups}
        for name, writers in fields.items():
            for g in self.groups:
                alike = [w for w in writers if kinds.get(w) == g.spec.kind]
                if alike and g.name not in writers and name not in g.skipped:
                    raise TraceError(
                        f"output {name!r} is written for group {sorted(alike)[0]!r} but never for "
                        f"group {g.name!r} of the same kind ({g.spec.kind}); write it, or say "
                        f"g.skip({name!r}) in the step function"
                    )
        groups = tuple(g.spec for g in self.groups)
        return Graph(tuple(self._dims), list(self.nodes), list(self.outputs), groups)


class GroupStep:
    """One KV-cache group inside a step function: the group's description, inputs and outputs."""

    def __init__(self, step: Step, spec: Group) -> None:
        self.step = step
        self.spec = spec
        self.name = spec.name
        self.skipped: set[str] = set()

    def __getattr__(self, field: str) -> Any:
        if field == "spec":
            raise AttributeError(field)
        return getattr(self.spec, field)

    def input(self, name: str, shape: Sequence[Extent] = (), **options: Any) -> Value:
        """`Step.input` of this group alone."""
        return self.step.input(name, shape, group=self.name, **options)

    def output(self, name: str, value: Scalar, **options: Any) -> None:
        """`Step.output` of this group alone."""
        self.step.output(name, value, group=self.name, **options)

    def skip(self, name: str) -> None:
        """This group has no field `name`, though others of its kind do."""
        self.skipped.add(name)


# -- functions over traced values --------------------------------------------------------------


def _step_of(*args: Any) -> Step:
    for a in args:
        if isinstance(a, Value):
            return a.step
    raise TraceError("expected at least one traced value")


def select(condition: Value, a: Scalar, b: Scalar) -> Value:
    """`a` where `condition` holds, else `b`, elementwise."""
    return _step_of(condition, a, b).apply("select", [condition, a, b])


def minimum(a: Scalar, b: Scalar) -> Value:
    """The smaller of two, elementwise."""
    return _step_of(a, b).apply("min", [a, b])


def maximum(a: Scalar, b: Scalar) -> Value:
    """The larger of two, elementwise."""
    return _step_of(a, b).apply("max", [a, b])


def gather(operand: Value, *indices: Scalar, fill: Scalar = 0) -> Value:
    """operand[indices], one index per dim; `fill` where an index is negative or out of range."""
    step = _step_of(operand, *indices)
    lifted: list[Any] = [step.lift(i) if isinstance(i, int) else i for i in indices]
    if any(isinstance(i, Value) and len(i.shape) == 2 for i in lifted):
        lifted = step._broadcast_together(lifted)
    fill = fill if isinstance(fill, Value) else step._literal(fill, operand.dtype)  # type: ignore[assignment]
    node = operand.use.node
    axes = node.param("axes") if node.prim == "input" else (None,) * len(operand.shape)
    return step._node("gather", [operand, fill, *lifted], {"axes": axes})


def scatter(state: Value, update: Scalar, *indices: Value) -> Value:
    """`state` with `update` written at `indices`; out of range writes nothing, the last one wins."""
    step = _step_of(state, *indices)
    return step.apply("scatter", [state, update, *indices])


def cumsum(x: Value, mode: str = "inclusive") -> Value:
    """Running sums along the last dim. mode "exclusive" starts at 0; "offsets" has one more entry."""
    return x.step.apply("cumsum", [x], mode=mode)


def reduce_sum(x: Value) -> Value:
    """Sum over the last dim."""
    return x.step.apply("reduce", [x], op="sum")


def reduce_max(x: Value) -> Value:
    """Greatest of the last dim (of nothing: the type's least value)."""
    return x.step.apply("reduce", [x], op="max")


def reduce_min(x: Value) -> Value:
    """Least of the last dim (of nothing: the type's greatest value)."""
    return x.step.apply("reduce", [x], op="min")


def segment_ids(offsets: Value, size: Extent) -> Value:
    """For t = 0, 1, ...: the segment i with offsets[i] <= t < offsets[i + 1]; past the last offset,
    the number of segments. Offsets must not decrease."""
    return offsets.step._node("segment_ids", [offsets], {"shape": (size,)})


def compact(mask: Value, fill: int) -> Value:
    """Positions of the true entries, in order, then `fill` up to the mask's extent (int32)."""
    return mask.step.apply("compact", [mask], fill=int(fill))


def custom_call(kernel: Any, *operands: Value, **params: Any) -> Any:
    """Apply a hand-written kernel; one value, or a list if the kernel has several results."""
    step = _step_of(*operands)
    values = step.nodes_of("custom_call", operands, {"kernel": kernel, **params})
    return values[0] if len(values) == 1 else values


F = TypeVar("F", bound=Callable[..., Any])


def stage(fn: F) -> F:
    """Decorator: nodes traced inside carry the function's name, in errors, dumps and profiles."""

    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        candidates = [*args, *kwargs.values()]
        step = next((_owner(a) for a in candidates if _owner(a) is not None), None)
        if step is None:
            raise TraceError(f"stage {fn.__name__!r} got no traced value, group or step")
        step._stages.append((fn.__name__, _user_line()))
        try:
            return fn(*args, **kwargs)
        finally:
            step._stages.pop()

    return inner  # type: ignore[return-value]


def _owner(x: Any) -> Step | None:
    if isinstance(x, Step):
        return x
    return x.step if isinstance(x, (Value, GroupStep)) else None


def _user_line() -> str:
    """file:line of the innermost frame outside this folder (the stage's own line)."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def trace(fn: Callable[[Step], Any], groups: Iterable[Group] = ()) -> Graph:
    """Run `fn` once over abstract values; the graph of what it computes.

    Raises TraceError, naming the stage and its line, for what cannot become a graph.
    """
    step = Step(groups)
    fn(step)
    return step.finish()
