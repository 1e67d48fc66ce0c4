"""The description of one KV-cache group: what its block table holds and how wide it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

KINDS = ("attention", "recurrent")
CACHE_MODES = ("none", "align", "all")


@dataclass(frozen=True)
class Group:
    """One KV-cache group.

    name: unique among the groups of a step.
    kind: "attention" (token slots) or "recurrent" (state indices: Mamba, GDN, short conv ...).
    block_size: tokens per block, as the allocator counts them.
    max_blocks: width of the group's block table, in blocks.
    cache_mode: recurrent groups only. "none": the row holds the 1 + K state blocks of a request;
        "align": one state block per `block_size` tokens, the current one is read; "all": as
        "align", with the last scheduled and the last computed block as separate outputs.
    kernel_block_size: attention groups only; tokens per block as the kernel counts (None: the
    same). window: sliding-window length in tokens (None: full attention).
    chunk: chunked-local attention chunk in tokens (None: full attention).
    num_spec_tokens: K, draft tokens per request; a recurrent row then has 1 + K states.
    ring: an attention group narrower than the sequence, whose columns are reused in turn.
    """

    name: str
    kind: str = "attention"
    block_size: int = 16
    max_blocks: int = 128
    cache_mode: str = "none"
    kernel_block_size: int | None = None
    window: int | None = None
    chunk: int | None = None
    num_spec_tokens: int = 0
    ring: bool = False

    def __post_init__(self) -> None:
        def bad(what: str) -> ValueError:
            return ValueError(f"group {self.name!r}: {what}")

        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"a group needs a non-empty name, got {self.name!r}")
        if self.kind not in KINDS:
            raise bad(f"kind must be one of {KINDS}, got {self.kind!r}")
        if self.cache_mode not in CACHE_MODES:
            raise bad(f"cache_mode must be one of {CACHE_MODES}, got {self.cache_mode!r}")
        for field in ("block_size", "max_blocks"):
            if getattr(self, field) < 1:
                raise bad(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.num_spec_tokens < 0:
            raise bad(f"num_spec_tokens must not be negative, got {self.num_spec_tokens}")
        kernel = self.kernel_block_size
        if kernel is not None and (kernel < 1 or self.block_size % kernel):
            raise bad(f"kernel_block_size {kernel} must divide block_size {self.block_size}")
        for field in ("window", "chunk"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise bad(f"{field} must be at least 1 token, got {value}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a step file's header."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Group:
        """The inverse of `to_dict`. Raises ValueError for an unknown field."""
        known = {f.name for f in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"unknown group fields {sorted(unknown)}; known are {sorted(known)}")
        return cls(**values)
