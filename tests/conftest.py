"""Shared fixtures and the meaning of the `gpu` marker."""

from __future__ import annotations

import functools

import pytest


@functools.cache
def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is not None and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
