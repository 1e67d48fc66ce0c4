"""An engine's loop with its block tables in stepgraph: requests arrive, grow and finish.

    python examples/owned_decode_loop.py [--steps 300] [--seed 0]

The model is a toy with the caches of a hybrid one: full attention (here: a sum over all tokens),
sliding-window attention (a sum over the last ones) and a recurrent state. It writes and reads its
caches only where the step's metadata says; so a token that equals the one computed without any
cache shows that the metadata was right.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import numpy as np

import stepgraph as sg
from stepgraph import stages

MAX_REQS, MAX_TOKENS, POOL_BLOCKS = 8, 64, 256
VOCABULARY, WINDOW = 50_021, 24
GROUPS = (
    sg.Group("full", block_size=16, max_blocks=16),
    sg.Group("window", block_size=8, max_blocks=32, window=WINDOW),
    sg.Group("state", "recurrent", block_size=256, max_blocks=1),
)


def metadata(s: sg.Step) -> None:
    """The step: what is queued in the block tables is written, then every field is derived."""
    tables = stages.update_tables(s, MAX_REQS)
    batch = stages.batch(s)
    s.output("query_start_loc", batch.query_start_loc)
    s.output("seq_lens", batch.seq_lens)
    for g in s.groups:
        table = tables[g.name]
        if g.kind == "recurrent":
            g.output("state_indices", stages.state_indices(table, batch))
            continue
        g.output("slot_mapping", stages.slot_mapping(table, batch))
        rows = stages.block_table(table, batch.rows)
        g.output("block_table", stages.window_block_table(rows, batch.num_computed_tokens, g))


# -- the toy model


def next_tokens(
    caches: dict[str, np.ndarray], tokens: np.ndarray, out: sg.Outputs, num_reqs: int
) -> list[int]:
    """Write the step's tokens to the caches, and give the next token of each request."""
    for g in GROUPS:
        if g.kind == "attention":
            caches[g.name][out["slot_mapping", g.name][: len(tokens)]] = tokens
    starts, lens = out["query_start_loc"], out["seq_lens"]
    made = []
    for b in range(num_reqs):
        new, length = tokens[starts[b] : starts[b + 1]], int(lens[b])
        state = out["state_indices", "state"][b, 0]
        value = caches["state"][state] if length > len(new) else 0  # a new request starts from 0
        for token in new:
            value = recur(value, token)
        caches["state"][state] = value
        seen = np.arange(length)
        full = cached(caches["full"], out["block_table", "full"][b], seen, 16)
        window = cached(caches["window"], out["block_table", "window"][b], seen[-WINDOW:], 8)
        made.append(mix(full, window, value))
    return made


def cached(cache: np.ndarray, row: np.ndarray, positions: np.ndarray, block: int) -> np.ndarray:
    return cache[row[positions // block].astype(np.int64) * block + positions % block]


def recur(state: int, token: int) -> int:
    return (31 * int(state) + int(token)) % VOCABULARY


def mix(full: np.ndarray, window: np.ndarray, state: int) -> int:
    return int((full.sum() + 3 * window.sum() + 7 * state) % VOCABULARY)


def without_cache(tokens: list[int]) -> int:
    """The next token, from all tokens of the request."""
    state = 0
    for token in tokens:
        state = recur(state, token)
    return mix(np.array(tokens), np.array(tokens[-WINDOW:]), state)


# -- the toy engine


@dataclass
class Request:
    tokens: list[int]  # prompt, then what was generated
    length: int  # it finishes with this many tokens
    row: int
    computed: int = 0
    blocks: dict[str, list[int]] = field(default_factory=lambda: {g.name: [] for g in GROUPS})


class Engine:
    """A scheduler with an allocator per group; `step` is one pass through the model."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tables = sg.BlockTables(GROUPS, MAX_REQS, pool_blocks=POOL_BLOCKS)
        # An update list longer than U or N is written by a call of its own.
        capacity = {"B": MAX_REQS, "T": MAX_TOKENS, "U": 64, "N": 256}
        self.compiled = sg.compile(
            sg.trace(metadata, GROUPS), capacity, buckets={"U": [64], "N": [256]}
        )
        self.tables.bind(self.compiled)
        self.free = {g.name: list(range(POOL_BLOCKS - 1, 0, -1)) for g in GROUPS}  # not block 0
        self.caches = {
            "full": np.zeros(POOL_BLOCKS * 16, np.int64),
            "window": np.zeros(POOL_BLOCKS * 8, np.int64),
            "state": np.zeros(POOL_BLOCKS, np.int64),
        }
        self.running: list[Request] = []
        self.finished = self.generated = 0

    def arrive(self) -> None:
        rows = set(range(MAX_REQS)) - {r.row for r in self.running}
        if rows and self.rng.random() < 0.2:
            prompt = self.rng.integers(VOCABULARY, size=self.rng.integers(1, 100)).tolist()
            request = Request(prompt, len(prompt) + int(self.rng.integers(1, 100)), min(rows))
            self.tables.add_row(request.row, dict.fromkeys(request.blocks, ()))
            self.running.append(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """Decodes, and chunks of prompts, up to MAX_TOKENS; with the blocks that they need."""
        budget, batch = MAX_TOKENS, []
        for request in self.running:
            count = min(len(request.tokens) - request.computed, budget)
            if count:
                batch.append((request, count))
                budget -= count
                self.grow(request, request.computed + count)
        return batch

    def grow(self, request: Request, length: int) -> None:
        needed = {g.name: -(-length // g.block_size) for g in GROUPS}
        new = {
            name: [self.free[name].pop() for _ in range(count - len(request.blocks[name]))]
            for name, count in needed.items()
        }
        if any(new.values()):
            self.tables.append(request.row, new)
        for name, ids in new.items():
            request.blocks[name] += ids

    def finish(self, request: Request) -> None:
        self.tables.clear_row(request.row)
        for name, ids in request.blocks.items():
            self.free[name] += ids
        self.running.remove(request)
        self.finished += 1

    def step(self) -> None:
        self.arrive()
        batch = self.schedule()
        tokens = [r.tokens[r.computed : r.computed + n] for r, n in batch]
        out = self.tables.run(
            self.compiled,
            B=len(batch),
            T=sum(n for _, n in batch),
            rows=[r.row for r, _ in batch],
            num_computed_tokens=[r.computed for r, _ in batch],
            num_scheduled_tokens=[n for _, n in batch],
        )
        flat = np.array([t for chunk in tokens for t in chunk], np.int64)
        made = next_tokens(self.caches, flat, out, len(batch))
        for (request, count), token in zip(batch, made, strict=True):
            request.computed += count
            if request.computed < len(request.tokens):
                continue  # a prompt that is not through yet
            if token != without_cache(request.tokens):
                raise SystemExit(f"row {request.row}, {request.computed} tokens: a wrong token")
            request.tokens.append(token)
            self.generated += 1
            if len(request.tokens) >= request.length:
                self.finish(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="engine steps (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (0)")
    args = parser.parse_args()
    engine = Engine(args.seed)
    for _ in range(args.steps):
        engine.step()
    stats = engine.compiled.stats
    print(
        f"{args.steps} steps, {engine.finished} requests finished, {engine.generated} tokens, "
        "each as computed without a cache"
    )
    print(f"{stats.replays} replays of {stats.captures} batch shapes")


if __name__ == "__main__":
    main()
