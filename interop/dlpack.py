"""Zero-copy views between PyTorch and NumPy on the CPU, by DLPack.

A view keeps its producer's memory alive, so it outlives the producer's name. PyTorch is imported
only when a tensor is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stepgraph.pipeline.errors import BindError


def to_numpy(array: Any) -> np.ndarray:
    """A NumPy view of a CPU array that speaks DLPack (a torch tensor, say); no copy.

    Raises BindError for memory on another device, a tensor that needs gradients, a dtype that NumPy
    lacks, or an object without DLPack.
    """
    if isinstance(array, np.ndarray):
        return array
    name = type(array).__name__
    if not hasattr(array, "__dlpack__"):
        raise BindError(f"{name} does not speak DLPack; pass a NumPy array or a tensor")
    kind, number = array.__dlpack_device__()
    if int(kind) != 1:
        raise BindError(f"the {name} lives on device {number} of kind {int(kind)}, not on the CPU")
    if getattr(array, "requires_grad", False):
        raise BindError(f"the {name} requires gradients; pass it detached")
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as err:
        raise BindError(f"the {name} has no NumPy view: {err}") from None


def to_torch(array: np.ndarray) -> Any:
    """A torch tensor on the memory of a writable NumPy array, with its strides; no copy.

    Raises BindError for a read-only array (torch has no read-only tensors) or an unknown dtype.
    """
    import torch

    if not array.flags.writeable:
        raise BindError("the array is read-only, and torch has no read-only tensors: copy it first")
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as err:
        raise BindError(f"the array has no torch view: {err}") from None
