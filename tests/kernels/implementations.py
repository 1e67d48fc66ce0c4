"""What the kernel contract is tested on: every implementation, called in one way.

Each method takes all groups at once: lists with one entry per KV-cache group. A new target joins by
a line in IMPLEMENTATIONS.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

import stepgraph as sg
from stepgraph.kernels import KERNELS
from tests.device.available import STANDS

Arrays = Sequence[np.ndarray]
Params = dict[str, Any]


class Implementation(Protocol):
    def update(
        self, tables: Arrays, counts: Arrays, ops: np.ndarray, offsets: np.ndarray, ids: np.ndarray
    ) -> None:
        """Applies the updates to `tables` and `counts` in place."""

    def gather(self, tables: Arrays, counts: Arrays, rows: np.ndarray) -> list[np.ndarray]: ...

    def slots(
        self, tables: Arrays, rows: np.ndarray, positions: np.ndarray, params: Sequence[Params]
    ) -> list[np.ndarray]: ...


class Reference:
    """The NumPy meaning, one group at a time."""

    def update(
        self, tables: Arrays, counts: Arrays, ops: np.ndarray, offsets: np.ndarray, ids: np.ndarray
    ) -> None:
        kernel = KERNELS["update_block_table"]
        for i, (table, count) in enumerate(zip(tables, counts, strict=True)):
            new = kernel.run_reference([table, count, ops, offsets, ids], {"group": i})
            table[...], count[...] = new

    def gather(self, tables: Arrays, counts: Arrays, rows: np.ndarray) -> list[np.ndarray]:
        kernel = KERNELS["gather_block_table"]
        return [
            kernel.run_reference([table, count, rows], {})[0]
            for table, count in zip(tables, counts, strict=True)
        ]

    def slots(
        self, tables: Arrays, rows: np.ndarray, positions: np.ndarray, params: Sequence[Params]
    ) -> list[np.ndarray]:
        kernel = KERNELS["slot_mapping"]
        return [
            kernel.run_reference([table, rows, positions], own)[0]
            for table, own in zip(tables, params, strict=True)
        ]


class CompiledStep:
    """A target of the compiler: a step that is nothing but the kernel."""

    def __init__(self, target: str, device: Callable[[], Any] = lambda: None) -> None:
        self.target, self.device = target, device

    def _compile(self, step: Any, tables: Arrays, counts: Arrays, **extents: int) -> sg.Compiled:
        groups = [sg.Group(f"g{i}", max_blocks=t.shape[1]) for i, t in enumerate(tables)]
        capacity = {name: max(n, 1) + 3 for name, n in extents.items()}
        buckets = {name: [n] for name, n in capacity.items()}
        compiled = sg.compile(
            sg.trace(step, groups),
            capacity,
            target=self.target,
            device=self.device(),
            buckets=buckets,
        )
        names = [g.name for g in groups]
        compiled.bind("table", dict(zip(names, tables, strict=True)))
        if counts:
            compiled.bind("counts", dict(zip(names, counts, strict=True)))
        return compiled

    def update(
        self, tables: Arrays, counts: Arrays, ops: np.ndarray, offsets: np.ndarray, ids: np.ndarray
    ) -> None:
        def step(s: sg.Step) -> None:
            lists = (
                s.input("ops", (s.dim("U"), 5)),
                s.input("offsets", (len(offsets),)),
                s.input("ids", (s.dim("N"),)),
            )
            for i, g in enumerate(s.groups):
                table = g.input("table", tables[i].shape, kind="state")
                count = g.input("counts", counts[i].shape, kind="state")
                new = sg.custom_call(KERNELS["update_block_table"], table, count, *lists, group=i)
                s.update(table, new[0])
                s.update(count, new[1])

        run = self._compile(step, tables, counts, U=len(ops), N=len(ids))
        run(U=len(ops), N=len(ids), ops=ops, offsets=offsets, ids=ids)

    def gather(self, tables: Arrays, counts: Arrays, rows: np.ndarray) -> list[np.ndarray]:
        def step(s: sg.Step) -> None:
            wanted = s.input("rows", (s.dim("B"),))
            for i, g in enumerate(s.groups):
                table = g.input("table", tables[i].shape, kind="device")
                count = g.input("counts", counts[i].shape, kind="device")
                out = sg.custom_call(KERNELS["gather_block_table"], table, count, wanted)
                g.output("out", out, pad=0)

        out = self._compile(step, tables, counts, B=len(rows))(B=len(rows), rows=rows)
        return [self._padded(out["out", f"g{i}"], len(rows), 0) for i in range(len(tables))]

    def slots(
        self, tables: Arrays, rows: np.ndarray, positions: np.ndarray, params: Sequence[Params]
    ) -> list[np.ndarray]:
        def step(s: sg.Step) -> None:
            t = s.dim("T")
            owners, places = s.input("rows", (t,)), s.input("positions", (t,), "int64")
            for i, g in enumerate(s.groups):
                table = g.input("table", tables[i].shape, kind="device")
                kernel = KERNELS["slot_mapping"]
                g.output("out", sg.custom_call(kernel, table, owners, places, **params[i]), pad=-1)

        run = self._compile(step, tables, (), T=len(rows))
        out = run(T=len(rows), rows=rows, positions=positions)
        return [self._padded(out["out", f"g{i}"], len(rows), -1) for i in range(len(tables))]

    @staticmethod
    def _padded(out: np.ndarray, n: int, pad: int) -> np.ndarray:
        assert len(out) > n
        assert (out[n:] == pad).all()
        return out[:n]


class Jax:
    """The kernels for JAX, jitted, their arrays longer than the actual extents."""

    def _run(self, name: str, extents: Sequence[int], arrays: Arrays, **params: Any) -> Any:
        import jax

        module, _, function = KERNELS[name].target("jax").partition(":")
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", True)
        try:
            kernel = getattr(importlib.import_module(module), function)
            run = jax.jit(lambda extents, arrays: kernel(extents, *arrays, **params))
            return jax.device_get(run(list(extents), list(arrays)))
        finally:
            jax.config.update("jax_enable_x64", before)

    def update(
        self, tables: Arrays, counts: Arrays, ops: np.ndarray, offsets: np.ndarray, ids: np.ndarray
    ) -> None:
        longer_ops = np.concatenate([ops, np.full((2, 5), 3, np.int32)])
        longer_ids = np.concatenate([ids, np.full(3, 55, np.int32)])
        for i, (table, count) in enumerate(zip(tables, counts, strict=True)):
            arrays = (table, count, longer_ops, offsets, longer_ids)
            new = self._run("update_block_table", (len(ops), len(ids)), arrays, group=i)
            table[...], count[...] = new

    def gather(self, tables: Arrays, counts: Arrays, rows: np.ndarray) -> list[np.ndarray]:
        return [
            self._run("gather_block_table", (len(rows),), (table, count, rows))
            for table, count in zip(tables, counts, strict=True)
        ]

    def slots(
        self, tables: Arrays, rows: np.ndarray, positions: np.ndarray, params: Sequence[Params]
    ) -> list[np.ndarray]:
        return [
            self._run("slot_mapping", (len(rows),), (table, rows, positions), **own)
            for table, own in zip(tables, params, strict=True)
        ]


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Reference(),
    "jax": Jax(),
    "cpu": CompiledStep("cpu"),
    **{name: CompiledStep(stand.target, stand.device) for name, stand in STANDS.items()},
}
