"""Two metadata dicts, field by field, bit for bit."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

# (class, field): blobs of a vendor call, with addresses in them, so two equal calls differ; dtype
# and shape are compared. The groups they belong to are built by vLLM's own builder in both cases.
OPAQUE = frozenset({("CPUAttentionMetadata", "scheduler_metadata")})


def differences(native: dict[str, Any], ours: dict[str, Any], limit: int = 8) -> list[str]:
    """What differs, as lines of text, at most `limit`: layers, types, fields, dtypes, shapes,
    strides, values."""
    if list(native) != list(ours):
        return [f"layers {list(native)} became {list(ours)}"]
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for layer in native:
        pair = (id(native[layer]), id(ours[layer]))
        if pair in seen:
            continue
        seen.add(pair)
        found += _differ(layer, native[layer], ours[layer])
        if len(found) >= limit:
            break
    return found[:limit]


def _differ(name: str, a: Any, b: Any, opaque: bool = False) -> list[str]:
    import torch

    if type(a) is not type(b):
        return [f"{name}: {type(a).__name__} became {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        for what in ("dtype", "device", "shape"):
            if getattr(a, what) != getattr(b, what):
                return [f"{name}: {what} {getattr(a, what)} became {getattr(b, what)}"]
        if a.numel() and a.stride() != b.stride():
            return [f"{name}: strides {a.stride()} became {b.stride()}"]
        if not opaque and not torch.equal(a, b):
            at = (a != b).flatten().nonzero()[:4].flatten().tolist()
            was, now = a.flatten()[at].tolist(), b.flatten()[at].tolist()
            return [f"{name}: at {at} {was} became {now}"]
        return []
    if is_dataclass(a):
        extra = set(vars(a)) ^ set(vars(b))
        if extra:
            return [f"{name}: attributes {sorted(extra)} are on one side only"]
        lines = []
        for f in fields(a):
            opaque = (type(a).__name__, f.name) in OPAQUE
            lines += _differ(f"{name}.{f.name}", getattr(a, f.name), getattr(b, f.name), opaque)
        return lines
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{name}: length {len(a)} became {len(b)}"]
        return [
            line
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for line in _differ(f"{name}[{i}]", x, y)
        ]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{name}: keys {list(a)} became {list(b)}"]
        return [line for key in a for line in _differ(f"{name}[{key!r}]", a[key], b[key])]
    return [] if a == b else [f"{name}: {a!r} became {b!r}"]
