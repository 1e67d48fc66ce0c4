"""Tracing: a step function runs once over abstract values, and what it does becomes a graph.

    def step(s):
        B = s.dim("B")
        computed = s.input("num_computed_tokens", (B,))
        scheduled = s.input("num_scheduled_tokens", (B,))
        s.output("seq_lens", computed + scheduled, pad=0)

`print(trace(step))` shows it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from .errors import TraceError
from .groups import Group
from .ir import DTYPES, Aval, Dim, Extent, Graph, Lit, Node, Operand, Output, Source, Use
from .primitives import PRIMITIVES
from .value import Scalar, Value

_HERE = str(Path(__file__).parent)
INT_RANGE = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "bool": (0, 1)}


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
        """Declare a persistent output. `pad` fills it past the actual extent: a constant or a
        traced scalar; None takes the padding contract's value for the field `name`."""
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

    def gather(self, operand: Value, indices: Sequence[Scalar], fill: Scalar = 0) -> Value:
        """See `ops.gather`."""
        lifted = self._broadcast_together([self.lift(i) for i in indices])
        fill_op: Any = fill if isinstance(fill, Value) else self._literal(fill, operand.dtype)
        return self.nodes_of("gather", [operand, fill_op, *lifted], {"axes": _axes(operand)})[0]

    def scatter(self, state: Value, update: Scalar, indices: Sequence[Value]) -> Value:
        """See `ops.scatter`."""
        return self.apply("scatter", [state, update, *indices], axes=_axes(state))

    def _broadcast_together(self, operands: list[Any]) -> list[Any]:
        rank2 = [o for o in operands if isinstance(o, Value) and len(o.shape) == 2]
        if not rank2:
            return operands
        shape: list[Extent] = [1, 1]
        for o in rank2:
            for axis, size in enumerate(o.shape):
                if size != 1:
                    if shape[axis] not in (1, size):
                        raise self.error(f"shapes differ: {', '.join(str(v.aval) for v in rank2)}")
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
            clash = next(
                (s for (w, n, _), s in self._names.items() if (w, n) == (what, name)), None
            )
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


def _axes(x: Value) -> Any:
    """What an index of each dim of an input must count; an updated state's as the state's own."""
    use = x.use
    while use.node.prim in ("scatter", "custom_call"):
        kernel = dict(use.node.params).get("kernel")
        places = {0: 0} if kernel is None else dict(kernel.in_place)
        if use.result not in places:
            break
        operand = use.node.operands[places[use.result]]
        assert isinstance(operand, Use)
        use = operand
    return use.node.param("axes") if use.node.prim == "input" else (None,) * len(x.shape)


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


F = TypeVar("F", bound=Callable[..., Any])


def stage(fn: F) -> F:
    """Decorator: nodes traced inside carry the function's name, in errors, dumps and profiles."""

    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        owners = map(_owner, [*args, *kwargs.values()])
        step = next((o for o in owners if o is not None), None)
        if step is None:
            raise TraceError(f"stage {fn.__name__!r} got no traced value, group or step")
        step._stages.append((fn.__name__, _user_line()))
        try:
            return fn(*args, **kwargs)
        finally:
            step._stages.pop()

    return inner  # type: ignore[return-value]


def _owner(x: Any) -> Step | None:
    """The trace that an argument of a stage belongs to; looks into dataclasses of values."""
    if isinstance(x, Step):
        return x
    if isinstance(x, (Value, GroupStep)):
        return x.step
    if is_dataclass(x):
        return next((o for f in fields(x) if (o := _owner(getattr(x, f.name))) is not None), None)
    return None


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
