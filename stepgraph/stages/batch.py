"""Fields of the whole batch: where each request's tokens are, how long it is, who owns a token."""

from __future__ import annotations

from dataclasses import dataclass

from stepgraph.pipeline.ir import Dim
from stepgraph.pipeline.ops import (
    cumsum,
    gather,
    maximum,
    reduce_max,
    reduce_sum,
    segment_ids,
    select,
)
from stepgraph.pipeline.trace import Step, stage
from stepgraph.pipeline.value import Value


@dataclass(frozen=True)
class Batch:
    """The values that the groups' stages start from. B requests in batch order, T tokens.

    rows: int32 (B,), the request row (row of the block tables) in each batch slot.
    num_computed_tokens, num_scheduled_tokens, seq_lens: int32 (B,).
    query_start_loc: int32 (B + 1,). token_to_request: int32 (T,). positions: int64 (T,).
    """

    rows: Value
    num_computed_tokens: Value
    num_scheduled_tokens: Value
    query_start_loc: Value
    seq_lens: Value
    token_to_request: Value
    positions: Value


def batch(s: Step, rows: Value | None = None) -> Batch:
    """Declare the host inputs `rows` (unless given: block tables that are in batch order already
    have none to look up), `num_computed_tokens` and `num_scheduled_tokens`, each int32 (B,), and
    derive the rest."""
    b, t = s.dim("B"), s.dim("T")
    if rows is None:
        rows = s.input("rows", (b,), unit="row")
    computed = s.input("num_computed_tokens", (b,))
    scheduled = s.input("num_scheduled_tokens", (b,))
    starts = query_start_loc(scheduled)
    owners = token_to_request(starts, t)
    return Batch(
        rows=rows,
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        query_start_loc=starts,
        seq_lens=seq_lens(computed, scheduled),
        token_to_request=owners,
        positions=positions(starts, owners, computed),
    )


@stage
def query_start_loc(num_scheduled_tokens: Value) -> Value:
    """int32 (B + 1,): first token of each request, then the number of tokens. Pad: the last value.

    Formula: [0, cumsum(num_scheduled_tokens)].
    """
    return cumsum(num_scheduled_tokens, "offsets")


@stage
def query_lens(starts: Value) -> Value:
    """int32 (B,): tokens of each request in this step. Pad: 0."""
    return starts[1:] - starts[:-1]


@stage
def seq_lens(num_computed_tokens: Value, num_scheduled_tokens: Value) -> Value:
    """int32 (B,): tokens of each request after this step (computed + scheduled). Pad: 0."""
    return num_computed_tokens + num_scheduled_tokens


@stage
def token_to_request(starts: Value, tokens: Dim) -> Value:
    """int32 (T,): the batch slot that owns each token. Pad: 0."""
    return segment_ids(starts, tokens)


@stage
def positions(starts: Value, owners: Value, num_computed_tokens: Value) -> Value:
    """int64 (T,): position of each token in its request. Pad: 0.

    Formula: num_computed_tokens[owner] + (t - query_start_loc[owner]); so a later chunk of a prompt
    goes on where the earlier one ended.
    """
    step = owners.step
    within = step.iota(owners.shape[0]) - gather(starts, owners)
    return gather(num_computed_tokens, owners).cast("int64") + within.cast("int64")


@stage
def is_padding(s: Step, tokens: Dim) -> Value:
    """bool (T,): false on every real token. Pad: true."""
    return s.iota(tokens) < 0


@stage
def step_kind_counts(
    starts: Value, num_computed_tokens: Value, num_prompt_tokens: Value
) -> dict[str, Value]:
    """Scalars (int32) that backends read on the host.

    num_decodes: requests past their prompt; num_prefills: the others with tokens in this step (a
    one-token prompt is a prefill, whatever its length); num_decode_tokens, num_prefill_tokens:
    their tokens; max_query_len, max_seq_len: 0 for an empty batch.
    """
    lens = query_lens(starts)
    decoding = num_computed_tokens >= num_prompt_tokens
    prefilling = ~decoding & (lens > 0)
    length = num_computed_tokens + lens
    return {
        "num_decodes": reduce_sum(decoding.cast("int32")),
        "num_prefills": reduce_sum(prefilling.cast("int32")),
        "num_decode_tokens": reduce_sum(select(decoding, lens, 0)),
        "num_prefill_tokens": reduce_sum(select(prefilling, lens, 0)),
        "max_query_len": maximum(reduce_max(lens), 0),
        "max_seq_len": maximum(reduce_max(length), 0),
    }
