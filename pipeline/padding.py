"""The padding contract: what each field holds past the step's actual extent, in one table.

Rows are requests `B` or tokens `T`; a captured step always writes its whole padded extent, so a pad
is as much a result as a real row. `Step.output` takes the pad of a field listed here by its name.
"""

from __future__ import annotations

from dataclasses import dataclass

REPEAT_LAST = "repeat last"


@dataclass(frozen=True)
class Pad:
    """The pad of one field: an integer or REPEAT_LAST; `why` for the reader of the docs."""

    pad: int | str
    dtype: str
    extent: str
    why: str


PADDING: dict[str, Pad] = {
    "query_start_loc": Pad(REPEAT_LAST, "int32", "B+1", "a padded request has no tokens"),
    "seq_lens": Pad(0, "int32", "B", "a padded request is an empty sequence"),
    "query_lens": Pad(0, "int32", "B", "a padded request has no tokens"),
    "num_computed_tokens": Pad(0, "int32", "B", "a padded request is an empty sequence"),
    "is_prefilling": Pad(0, "bool", "B", "a padded request is never a prefill"),
    "positions": Pad(0, "int64", "T", "a safe index for rotary tables"),
    "token_to_request": Pad(0, "int32", "T", "a safe row index"),
    "is_padding": Pad(1, "bool", "T", "true exactly on padded tokens"),
    "slot_mapping": Pad(-1, "int64", "T", "never written: kernels skip -1"),
    "block_table": Pad(0, "int32", "B", "the null block"),
    "kernel_block_table": Pad(0, "int32", "B", "the null block"),
    "state_indices": Pad(0, "int32", "B", "the null block"),
    "last_scheduled_block": Pad(0, "int32", "B", "the null block's column"),
    "last_computed_block": Pad(0, "int32", "B", "the null block's column"),
    "num_accepted_tokens": Pad(1, "int32", "B", "n - 1 is used as an index"),
    "local_seq_lens": Pad(0, "int32", "B", "a padded request is an empty sequence"),
    "local_token_bounds": Pad(0, "int32", "T", "a padded token sees nothing"),
    "page_indptr": Pad(REPEAT_LAST, "int32", "B+1", "a padded request has no pages"),
    "last_page_len": Pad(1, "int32", "B", "consumers divide and index by it"),
    "page_indices": Pad(0, "int32", "P", "the null block"),
}
