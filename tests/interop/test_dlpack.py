"""Views, not copies; and what is said when there can be none."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from stepgraph.interop.dlpack import to_numpy, to_torch
from stepgraph.pipeline.errors import BindError


def test_a_numpy_array_is_its_own_view() -> None:
    array = np.arange(4)
    assert to_numpy(array) is array


def test_the_view_of_another_producer_shares_its_memory_and_outlives_its_name() -> None:
    class Producer:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    producer = Producer(np.arange(6, dtype=np.int32).reshape(2, 3))
    address = producer.array.ctypes.data
    view = to_numpy(producer)
    del producer
    gc.collect()
    np.empty(1000)
    assert view.ctypes.data == address
    assert view.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_memory_elsewhere_is_refused() -> None:
    class OnGpu:
        def __dlpack__(self, **options: Any) -> Any:
            raise AssertionError("must not be asked for")

        def __dlpack_device__(self) -> Any:
            return (2, 0)

    with pytest.raises(BindError, match="not on the CPU"):
        to_numpy(OnGpu())
    with pytest.raises(BindError, match="does not speak DLPack"):
        to_numpy([1, 2, 3])


def test_torch_views() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; run with it in CI")
    array = np.arange(12, dtype=np.int32).reshape(3, 4)[:, :2]
    tensor = to_torch(array)
    assert tensor.data_ptr() == array.ctypes.data and tensor.stride() == (4, 1)
    back = to_numpy(tensor)
    assert back.ctypes.data == array.ctypes.data and back.strides == array.strides
    tensor[1, 1] = 77
    assert array[1, 1] == 77 == back[1, 1]
    with pytest.raises(BindError, match="gradients"):
        to_numpy(torch.zeros(2, requires_grad=True))
    with pytest.raises(BindError, match="no NumPy view"):
        to_numpy(torch.zeros(2, dtype=torch.bfloat16))
    array.setflags(write=False)
    with pytest.raises(BindError, match="read-only"):
        to_torch(array)


def test_bool_views() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; run with it in CI")
    flags = np.zeros(3, np.bool_)
    tensor = to_torch(flags)
    assert tensor.dtype == torch.bool
    flags[1] = True
    assert tensor.tolist() == [False, True, False]
