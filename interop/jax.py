"""`to_jax`: a graph as a function that `jax.jit` accepts, for engines written in JAX. JAX is
imported when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from stepgraph.pipeline.custom_call import Kernel
from stepgraph.pipeline.errors import BindError, CaptureError, CompileError
from stepgraph.pipeline.ir import Aval, Consts, Dim, Extent, Graph, Lit, Node, Operand, extent_of
from stepgraph.pipeline.oracle import Key
from stepgraph.pipeline.primitives import identity

Arrays = Any


def to_jax(graph: Graph, padded: Mapping[str, int]) -> Callable[..., dict[Key, Any]]:
    """`fn(inputs, actual)`: all outputs of `graph` for a batch shape, with the oracle's values.

    padded: the extents of the batch shape. inputs: as for `evaluate`, over the padded extents.
    actual: {dim: actual extent}, integers or traced scalars: one compilation serves every batch
    that fits. Outputs marked `host`, and updated states (full extent, under the state's name), are
    among the outputs.

    Raises CompileError if JAX is missing, a kernel has no JAX implementation, or the graph has
    int64 values and JAX's 64-bit types are off; CaptureError for wrong dims; BindError for an input
    that is missing or has another dtype or shape.
    """
    try:
        import jax
    except ImportError as err:
        raise CompileError(f"to_jax needs JAX ({err}): pip install 'stepgraph[jax]'") from None
    wide = any(aval.dtype == "int64" for node in graph.nodes for aval in node.avals)
    if missing := sorted(set(graph.dims) ^ set(padded)):
        raise CaptureError(f"the dims are {list(graph.dims)}; missing or unknown: {missing}")

    def fn(inputs: Mapping[Any, Any], actual: Mapping[str, Any]) -> dict[Key, Any]:
        if wide and not jax.config.jax_enable_x64:
            raise CompileError(
                "the graph has int64 values (slot mappings): set JAX_ENABLE_X64=1, or "
                "jax.config.update('jax_enable_x64', True), before the first call"
            )
        if missing := sorted(set(graph.dims) ^ set(actual)):
            raise CaptureError(f"the dims are {list(graph.dims)}; missing or unknown: {missing}")
        return _Evaluation(graph, padded, actual, inputs).outputs()

    return fn


class _Evaluation:
    """One trace: `values[node][member]` are the results, over padded extents. What lies past the
    actual extent is anything, so whatever looks across elements masks it."""

    def __init__(
        self,
        graph: Graph,
        padded: Mapping[str, int],
        actual: Mapping[str, Any],
        inputs: Mapping[Any, Any],
    ) -> None:
        import jax.numpy as jnp

        self.jnp = jnp
        self.graph, self.padded, self.inputs = graph, padded, inputs
        self.actual = {name: jnp.asarray(n).astype(jnp.int32) for name, n in actual.items()}
        self.values: dict[Node, list[tuple[Any, ...]]] = {}
        for node in graph.nodes:
            self.values[node] = [self._results(node, m) for m in range(node.n or 1)]

    def outputs(self) -> dict[Key, Any]:
        out: dict[Key, Any] = {}
        for output in self.graph.outputs:
            for m in range(len(output.groups or ("",))):
                value = self._operand(output.use, m)
                key: Key = output.name if output.groups is None else (output.name, output.groups[m])
                if output.updates is None:
                    inside = self._inside(output.use.aval.of_member(m))
                    value = self.jnp.where(inside, value, self._operand(output.pad, m))
                out[key] = value
        return out

    def _results(self, node: Node, m: int) -> tuple[Any, ...]:
        if node.prim == "input":
            return (self._input(node, m),)
        args = [self._operand(op, m) for op in node.operands]
        params = {
            k: v.values[m] if hasattr(v, "values") and k != "size" else v for k, v in node.params
        }
        avals = [aval.of_member(m) for aval in node.avals]
        if node.prim == "custom_call":
            of = [_aval(op).of_member(m) for op in node.operands]
            return self._kernel(params.pop("kernel"), params, args, of)
        rule = getattr(self, f"_{node.prim}", None)
        if rule is not None:
            return (rule(args, params, avals[0], [_aval(op) for op in node.operands], m),)
        # elementwise, and wrapping like NumPy
        result = _elementwise(self.jnp)[node.prim](*args)
        return (self.jnp.broadcast_to(result, self._shape(avals[0])),)

    def _operand(self, op: Operand, m: int) -> Any:
        if isinstance(op, Lit):
            return self.jnp.asarray(op.value, op.dtype)
        if isinstance(op, Consts):
            return self.jnp.asarray(op.values[m], op.dtype)
        return self.values[op.node][op.member(m)][op.result]

    def _shape(self, aval: Aval) -> tuple[int, ...]:
        return tuple(extent_of(dim, self.padded) for dim in aval.shape)

    def _size(self, dim: Extent, m: int) -> Any:
        """The actual extent."""
        return extent_of(dim, self.actual, m)

    def _inside(self, aval: Aval) -> Any:
        """True within the actual extents; broadcasts against the padded shape."""
        ok: Any = True
        for axis, dim in enumerate(aval.shape):
            if isinstance(dim, Dim):
                view = [-1 if a == axis else 1 for a in range(len(aval.shape))]
                count = self.jnp.arange(extent_of(dim, self.padded))
                ok = ok & (count < self._size(dim, 0)).reshape(view)
        return ok

    def _input(self, node: Node, m: int) -> Any:
        name, groups = node.param("name"), node.param("groups")
        group, aval = (None if groups is None else groups[m]), node.aval.of_member(m)
        label = name if group is None else f"{name}[{group}]"
        found = self.inputs.get(name if group is None else (name, group))
        if found is None and isinstance(self.inputs.get(name), Mapping):
            found = self.inputs[name].get(group)
        if found is None:
            raise BindError(f"input {label!r} has no value")
        shape = self._shape(aval)
        if str(found.dtype) != aval.dtype:
            raise BindError(f"input {label!r} is {found.dtype}, the graph wants {aval.dtype}")
        if tuple(found.shape) != shape:
            raise BindError(f"input {label!r} has shape {tuple(found.shape)}, not {shape} (padded)")
        return self.jnp.asarray(found)

    def _kernel(
        self, kernel: Kernel, params: dict[str, Any], args: list[Any], avals: list[Aval]
    ) -> tuple[Any, ...]:
        module, _, function = kernel.target("jax").partition(":")
        extents = [self._size(dim, 0) for dim in kernel.extents(avals)]
        out = getattr(importlib.import_module(module), function)(extents, *args, **params)
        return out if isinstance(out, tuple) else (out,)

    # -- primitives that are not elementwise: (args, params, result aval, operand avals, member)

    def _cast(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        return args[0].astype(params["dtype"])

    def _copy(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        return args[0]

    def _iota(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        return self.jnp.arange(*self._shape(aval)).astype(aval.dtype)

    def _broadcast(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        view, x = [1] * len(aval.shape), args[0]
        for size, axis in zip(x.shape, params["axes"], strict=True):
            view[axis] = size
        return self.jnp.broadcast_to(x.reshape(view), self._shape(aval))

    def _extent(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        return self.jnp.asarray(self._size(params["size"], m), aval.dtype)

    def _places(self, indices: list[Any], aval: Aval, m: int) -> tuple[Any, list[Any]]:
        ok: Any = True
        for index, dim in zip(indices, aval.shape, strict=True):
            ok = ok & (index >= 0) & (index < self._size(dim, m))
        return ok, [self.jnp.where(ok, index, 0) for index in indices]

    def _gather(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        operand, fill, *indices = args
        if operand.size == 0:
            return self.jnp.full(self._shape(aval), fill)
        ok, places = self._places(indices, of[0], m)
        return self.jnp.broadcast_to(
            self.jnp.where(ok, operand[tuple(places)], fill), self._shape(aval)
        )

    def _scatter(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        """One update after another: of several to one element the last one wins."""
        from jax import lax

        operand, update, *indices = args
        ok, _ = self._places(indices, of[0], m)
        longest = max((a.of_member(m) for a in of[1:]), key=lambda a: len(a.shape))
        ok = ok & self._inside(longest)
        flat = [a.reshape(-1) for a in self.jnp.broadcast_arrays(update, ok, *indices)]
        if operand.size == 0:
            return operand

        def write(k: Any, out: Any) -> Any:
            at = tuple(self.jnp.where(flat[1][k], index[k], 0) for index in flat[2:])
            return out.at[at].set(self.jnp.where(flat[1][k], flat[0][k], out[at]))

        return lax.fori_loop(0, flat[0].size, write, operand)

    def _cumsum(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        x = args[0]
        total = self.jnp.cumsum(x, axis=-1, dtype=x.dtype)
        if params["mode"] == "inclusive":
            return total
        if params["mode"] == "exclusive":
            return total - x
        return self.jnp.concatenate([self.jnp.zeros(1, x.dtype), total])

    def _reduce(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        start = self.jnp.asarray(identity(params["op"], aval.dtype), aval.dtype)
        x = self.jnp.where(self._inside(of[0].of_member(m)), args[0], start)
        fold = {"sum": self.jnp.sum, "max": self.jnp.max, "min": self.jnp.min}[params["op"]]
        more = {"dtype": x.dtype} if params["op"] == "sum" else {}
        return fold(x, axis=-1, initial=start, **more)

    def _segment_ids(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        from jax import lax

        offsets, info = args[0], self.jnp.iinfo(args[0].dtype)
        inside = self._inside(of[0].of_member(m))
        ends = lax.cummax(self.jnp.where(inside, offsets, info.max)[1:])
        places = self.jnp.arange(*self._shape(aval))
        found = self.jnp.searchsorted(ends, places, side="right").astype(self.jnp.int32)
        count = self.jnp.maximum(self._size(of[0].shape[0], m) - 1, 0)
        return self.jnp.minimum(found, count).astype(self.jnp.int32)

    def _compact(self, args: Any, params: Any, aval: Aval, of: Any, m: int) -> Any:
        mask = args[0] & self._inside(of[0].of_member(m))
        (size,) = self._shape(aval)
        return self.jnp.nonzero(mask, size=size, fill_value=params["fill"])[0].astype(
            self.jnp.int32
        )


def _aval(op: Operand) -> Aval:
    return Aval((), op.dtype) if isinstance(op, (Lit, Consts)) else op.aval


def _elementwise(jnp: Any) -> dict[str, Callable[..., Any]]:
    def by_zero(rule: Callable[..., Any]) -> Callable[..., Any]:
        """x // 0 = x % 0 = 0."""

        def safe(a: Any, b: Any) -> Any:
            return jnp.where(b == 0, 0, rule(a, jnp.where(b == 0, 1, b))).astype(a.dtype)

        return safe

    return {
        "add": jnp.add,
        "sub": jnp.subtract,
        "min": jnp.minimum,
        "max": jnp.maximum,
        "mul": jnp.multiply,
        "floordiv": by_zero(jnp.floor_divide),
        "mod": by_zero(jnp.mod),
        "neg": jnp.negative,
        "and": jnp.bitwise_and,
        "or": jnp.bitwise_or,
        "xor": jnp.bitwise_xor,
        "not": jnp.invert,
        "lt": jnp.less,
        "le": jnp.less_equal,
        "gt": jnp.greater,
        "ge": jnp.greater_equal,
        "eq": jnp.equal,
        "ne": jnp.not_equal,
        "select": jnp.where,
    }
