"""Called in the engine's process before the engine exists: planted faults and probes."""

from __future__ import annotations

from typing import Any

DECODE = 20  # the decode-only build (of one builder) that a fault is planted in


def corrupt_state_index() -> dict[str, Any]:
    """One recurrent state index of one group, in one step, names another request's state."""
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder as Builder

    inner, seen = Builder.build, {"decodes": 0, "planted": 0}

    def build(self: Any, prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
        out = inner(self, prefix, common, *args, **kwargs)
        if out.num_prefills == 0 and out.num_decodes > 1:
            seen["decodes"] += 1
            if seen["decodes"] == DECODE:
                out.state_indices_tensor_d = out.state_indices_tensor_d.clone()
                out.state_indices_tensor_d[0] = out.state_indices_tensor_d[1]
                seen["planted"] += 1
        return out

    Builder.build = build
    return seen


def corrupt_slot() -> dict[str, Any]:
    """One slot of one step lies one token further."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    inner, seen = Builder.build, {"decodes": 0, "planted": 0}

    def build(self: Any, prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
        out = inner(self, prefix, common, *args, **kwargs)
        if out.max_query_len == 1:
            seen["decodes"] += 1
            if seen["decodes"] == DECODE:
                # In place: the layers read the runner's slot buffer through the forward context.
                out.slot_mapping[0] += 1
                seen["planted"] += 1
        return out

    Builder.build = build
    return seen
