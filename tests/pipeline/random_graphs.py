"""Random step functions: well-typed expressions over shared and per-group values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import stepgraph as sg

SPEC_TOKENS = 2
Pick = Callable[[random.Random], int]


def random_groups(rnd: random.Random) -> list[sg.Group]:
    return [
        sg.Group(f"g{i}", block_size=rnd.choice([1, 4, 4, 16]), max_blocks=rnd.choice([1, 3, 5]))
        for i in range(rnd.choice([0, 1, 2, 3, 7]))
    ]


def random_step(seed: int) -> Callable[[sg.Step], None]:
    """A step function drawn by `seed`; each group draws the same expressions over its own values,
    with constants of its own."""

    def step(s: sg.Step) -> None:
        b, t = s.dim("B"), s.dim("T")
        rnd = random.Random(seed)
        pool = [
            s.input("a", (b,)),
            s.input("b", (b,), "int64"),
            s.input("t", (t,)),
            s.input("m", (b,), "bool"),
            s.input("n", ()),
            s.input("ab", (b, SPEC_TOKENS)),
        ]
        _grow(s, pool, rnd, rnd.randint(0, 6), lambda r: r.choice([0, 1, -1, 3, 16, 2**31 - 1]))
        for k in range(rnd.randint(1, 3)):
            s.output(f"s{k}", rnd.choice(pool), pad=rnd.choice([0, 1]))
        group_seed, size = rnd.random(), rnd.randint(3, 14)
        for g in s.groups:
            own = random.Random(group_seed)
            mine = [
                *pool,
                g.input("table", (9, g.max_blocks), kind="device"),
                g.input("v", (b,)),
            ]
            _grow(s, mine, own, size, lambda r, g=g: r.choice([g.block_size, 0, 1, 2, -3]))
            for k in range(own.randint(1, 3)):
                value = mine[-1 - own.randrange(3)]
                scalars = [p for p in mine if p.shape == () and p.dtype == value.dtype]
                g.output(f"o{k}", value, pad=own.choice([*scalars, 0, 1]))

    return step


def _grow(s: sg.Step, pool: list[Any], rnd: random.Random, size: int, constant: Pick) -> None:
    for _ in range(size):
        value = _draw(s, pool, rnd, constant)
        if value is not None:
            pool.append(value)


def _draw(s: sg.Step, pool: list[Any], r: random.Random, constant: Pick) -> Any:
    b, t = s.dim("B"), s.dim("T")
    x = r.choice(pool)
    alike = [v for v in pool if v.shape == x.shape and v.dtype == x.dtype]
    integers = [v for v in pool if v.dtype != "bool"]
    is_bool, rank = x.dtype == "bool", len(x.shape)
    y = r.choice(alike) if is_bool else r.choice([*alike, constant(r), constant(r)])
    masks = [v for v in pool if v.dtype == "bool"]
    kind = r.choice(
        "arith arith arith compare limit unary select cast scan reduce iota expand gather gather "
        "compact segments extent".split()
    )
    if kind == "arith":
        if is_bool:
            return r.choice([lambda: x & y, lambda: x | y, lambda: x ^ y])()
        return r.choice(
            [lambda: x + y, lambda: x - y, lambda: x * y, lambda: x // y, lambda: x % y]
        )()
    if kind == "compare" and not is_bool:
        return r.choice([lambda: x < y, lambda: x <= y, lambda: x == y, lambda: x != y])()
    if kind == "limit" and not is_bool:
        return r.choice([sg.minimum, sg.maximum])(x, y)
    if kind == "unary":
        return ~x if is_bool else -x
    if kind == "select":
        conditions = [m for m in masks if m.shape in (x.shape, ())]
        return sg.select(r.choice(conditions), x, y) if conditions else None
    if kind == "cast":
        return x.cast(r.choice(["int32", "int64", "bool"]))
    if kind == "scan" and rank and not is_bool:
        return sg.cumsum(x, r.choice(["inclusive", "exclusive", *["offsets"] * (rank == 1)]))
    if kind == "reduce" and rank:
        return r.choice([sg.reduce_max, sg.reduce_min, *[sg.reduce_sum] * (not is_bool)])(x)
    if kind == "iota":
        return s.iota(r.choice([b, t, SPEC_TOKENS]))
    if kind == "expand" and rank == 1:
        return x.expand(r.choice([0, 1]))
    if kind == "gather" and rank == 1:
        return sg.gather(x, r.choice(integers), fill=0 if is_bool else r.choice([0, -1, 7]))
    if kind == "gather" and rank == 2:
        i = r.choice(integers)
        return sg.gather(x, i, r.choice([v for v in integers if v.shape == i.shape]))
    if kind == "compact":
        flat = [m for m in masks if len(m.shape) == 1]
        return sg.compact(r.choice(flat), r.choice([-1, 0])) if flat else None
    if kind == "segments":
        flat = [v for v in integers if len(v.shape) == 1]
        return sg.segment_ids(r.choice(flat), r.choice([b, t])) if flat else None
    return s.extent(r.choice([b, t, b + 1]))
