"""The oracle: NumPy evaluation of a graph. It defines what every compiled target must give, bit for
bit, and evaluates a graph after any pass as well as before the first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from .errors import BindError
from .ir import DTYPES, Aval, Consts, Graph, Lit, Node, Operand, Sizes, extent_of
from .primitives import PRIMITIVES

Key: TypeAlias = "str | tuple[str, str]"


def evaluate(
    graph: Graph,
    inputs: Mapping[Any, Any],
    actual: Mapping[str, int],
    padded: Mapping[str, int] | None = None,
) -> dict[Key, np.ndarray]:
    """All outputs of `graph`: {name: array}, {(name, group): array} for a group's own field.

    inputs: {name: array}, {(name, group): array} or {name: {group: array}}; an array may be larger
        than the actual extent (a persistent buffer), the rest is not read.
    actual, padded: extents of the symbolic dims; each output has its padded extent.
    State updates come back under the state's name, over the state's full extent.
    """
    padded = actual if padded is None else padded
    values: dict[Node, list[tuple[np.ndarray, ...]]] = {}

    def operand(op: Operand, m: int) -> np.ndarray:
        if isinstance(op, Lit):
            return DTYPES[op.dtype].type(op.value)  # type: ignore[return-value]
        if isinstance(op, Consts):
            return DTYPES[op.dtype].type(op.values[m])  # type: ignore[return-value]
        return values[op.node][op.member(m)][op.result]

    for node in graph.nodes:
        values[node] = []
        for m in range(node.n or 1):
            if node.prim == "input":
                values[node].append((_input(node, m, inputs, actual),))
                continue
            shapes = [_shape(a, actual, m) for a in node.avals]
            params = {k: _member_param(k, v, m) for k, v in node.params}
            if "size" in params:
                params["size"] = extent_of(params["size"], actual, m)
            args = [operand(op, m) for op in node.operands]
            got = PRIMITIVES[node.prim].numpy(args, params, shapes)
            results = got if isinstance(got, tuple) else (got,)
            for result, aval, shape in zip(results, node.avals, shapes, strict=True):
                have = (np.asarray(result).shape, np.asarray(result).dtype)
                if have != (shape, DTYPES[aval.dtype]):
                    raise AssertionError(f"{node.prim}: the NumPy rule gave {have}, not {aval}")
            values[node].append(tuple(np.asarray(r) for r in results))

    out: dict[Key, np.ndarray] = {}
    for output in graph.outputs:
        for m in range(len(output.groups or ("",))):
            value = values[output.use.node][output.use.member(m)][output.use.result]
            key: Key = output.name if output.groups is None else (output.name, output.groups[m])
            if output.updates is not None:
                out[key] = value.copy()
                continue
            full = np.empty(_shape(output.use.aval, padded, m), value.dtype)
            full[...] = operand(output.pad, m)
            full[tuple(slice(0, size) for size in value.shape)] = value
            out[key] = full
    return out


def _member_param(name: str, value: Any, m: int) -> Any:
    """A static integer of a kernel that differs between members; extents keep their meaning."""
    return value.values[m] if isinstance(value, Sizes) and name != "size" else value


def _shape(aval: Aval, env: Mapping[str, int], m: int) -> tuple[int, ...]:
    return tuple(extent_of(dim, env, m) for dim in aval.shape)


def _input(node: Node, m: int, inputs: Mapping[Any, Any], env: Mapping[str, int]) -> np.ndarray:
    name, groups, aval = node.param("name"), node.param("groups"), node.aval
    group = None if groups is None else groups[m]
    label = name if group is None else f"{name}[{group}]"
    found = inputs.get((name, group)) if group is not None else inputs.get(name)
    if found is None and group is not None and isinstance(inputs.get(name), Mapping):
        found = inputs[name].get(group)
    if found is None:
        raise BindError(f"input {label!r} has no value")
    array, shape = np.asarray(found), _shape(aval, env, m)
    if array.dtype != DTYPES[aval.dtype]:
        raise BindError(f"input {label!r} is {array.dtype}, the graph wants {aval.dtype}")
    if array.ndim != len(shape) or any(h < w for h, w in zip(array.shape, shape, strict=True)):
        raise BindError(f"input {label!r} has shape {array.shape}, this step reads {shape}")
    return array[tuple(slice(0, size) for size in shape)]
