"""Decode context parallelism: each rank holds its share of every request's tokens.

The ranks take turns, `interleave` tokens each: rank r of `size` holds position p iff
(p // interleave) % size == r. The slots of a rank's tokens come from `slot_mapping`.
"""

from __future__ import annotations

from stepgraph.pipeline.ops import maximum, minimum
from stepgraph.pipeline.trace import stage
from stepgraph.pipeline.value import Value

from .batch import Batch


@stage
def local_seq_lens(seq_lens: Value, *, cp_size: int, cp_rank: int, cp_interleave: int = 1) -> Value:
    """int32 (B,): how many of each request's first `seq_len` tokens the rank holds. Pad: 0.

    Formula: full rounds times interleave, plus the rank's share of the last, partial round (vLLM's
    get_dcp_local_seq_lens).
    """
    if not (cp_size >= 1 and 0 <= cp_rank < cp_size and cp_interleave >= 1):
        raise seq_lens.step.error(
            f"rank {cp_rank} of {cp_size} context-parallel ranks, interleave {cp_interleave}"
        )
    rounds = seq_lens // (cp_size * cp_interleave)
    rest = seq_lens % (cp_size * cp_interleave)
    share = minimum(maximum(rest - cp_rank * cp_interleave, 0), cp_interleave)
    return rounds * cp_interleave + share


@stage
def local_token_bounds(
    batch: Batch, *, cp_size: int, cp_rank: int, cp_interleave: int = 1
) -> Value:
    """int32 (T,): how many of the rank's tokens each token sees, itself included. Pad: 0.

    Expands first and localises second: a token sees its request's first `position + 1` tokens, and
    the rank's share of those is no difference of request lengths.
    """
    bounds = batch.positions + 1
    local = local_seq_lens(bounds, cp_size=cp_size, cp_rank=cp_rank, cp_interleave=cp_interleave)
    return local.cast("int32")
