"""Paged lists (as FlashInfer takes them): the pages of all requests end to end, and where each
begins."""

from __future__ import annotations

from stepgraph.pipeline.ir import Dim
from stepgraph.pipeline.ops import cumsum, gather, segment_ids, select
from stepgraph.pipeline.trace import stage
from stepgraph.pipeline.value import Value

from .tables import Table


@stage
def page_counts(seq_lens: Value, page_size: int) -> Value:
    """int32 (B,): pages in use per request, ceil(seq_len / page_size). Pad: 0 pages.

    page_size is the kernel's block size, which may be smaller than the allocator's.
    """
    return (seq_lens - 1) // page_size + 1  # seq_len + page_size - 1 could leave int32


@stage
def page_indptr(counts: Value) -> Value:
    """int32 (B + 1,): where each request's pages begin. Pad: the last value (no pages)."""
    return cumsum(counts, "offsets")


@stage
def last_page_len(seq_lens: Value, page_size: int) -> Value:
    """int32 (B,): tokens in each request's last page, 1..page_size; 1 for an empty sequence.
    Pad: 1."""
    rest = (seq_lens - 1) % page_size + 1
    return select(seq_lens > 0, rest, 1)


@stage
def page_indices(table: Table, rows: Value, indptr: Value, pages: Dim) -> Value:
    """int32 (P,): page ids of all requests end to end. Pad: 0."""
    owner = segment_ids(indptr, pages)
    column = rows.step.iota(pages) - gather(indptr, owner)
    return gather(table.blocks, gather(rows, owner, fill=-1), column)


@stage
def translate_pages(pages: Value, token_map: Value, page_size: int) -> Value:
    """int32, as `pages`: page ids of one pool in another, by a map from token to token. Pad: 0.

    token_map: int32 or int64 (tokens of the first pool,), which sends whole pages to whole pages:
    page p begins at token p * page_size. A page outside the map becomes the null block.
    """
    # a product has no unit: what counted pages counts tokens now
    tokens = pages.cast("int64") * page_size
    return (gather(token_map, tokens) // page_size).cast("int32")
