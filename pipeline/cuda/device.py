"""`CudaDevice`: the `Device` that is a GPU. Work goes to torch's current stream."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from stepgraph.pipeline.errors import BindError, CaptureError, CompileError
from stepgraph.pipeline.lower.simt import THREADS
from stepgraph.pipeline.lower.source import Source
from stepgraph.pipeline.memory import Layout
from stepgraph.pipeline.targets import target_of

MINIMUM = (7, 0)  # compute capability; older ones are not compiled for


def import_torch() -> Any:
    """torch with a CUDA device. Raises CompileError that says what is missing."""
    try:
        import torch
    except ImportError as err:
        raise CompileError(
            f"a CUDA target needs torch ({err}): pip install 'stepgraph[torch]', or compile with "
            "target='cpu'"
        ) from None
    if torch.version.cuda is None:
        raise CompileError(
            f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch, or "
            "compile with target='cpu'"
        )
    if not torch.cuda.is_available():
        raise CompileError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no CUDA device: see "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or compile with target='cpu'"
        )
    return torch


class Unordered:
    """An array whose exchange by DLPack does not wait for a stream: steps follow the caller's
    stream anyway, and a wait inside a capture would end it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        # -1: do not synchronize (array API standard); memory of the CPU has no stream at all
        return self.array.__dlpack__(stream=None if stream is None else -1, **options)


class TorchMemory:
    """torch tensors on one CUDA device."""

    def __init__(self, torch: Any, device: Any) -> None:
        self.torch, self.device = torch, device
        self.dtypes = {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64}

    def zeros(self, nbytes: int) -> Any:
        try:
            # torch aligns what it allocates to 512 bytes
            return self.torch.zeros(max(nbytes, 1), dtype=self.torch.uint8, device=self.device)
        except self.torch.OutOfMemoryError as err:
            raise CaptureError(
                f"{nbytes} bytes of {self.device} memory are not free: compile with a smaller "
                f"capacity, or leave memory to it ({err})"
            ) from None

    def view(self, raw: Any, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        of = self.dtypes[dtype]
        nbytes = int(np.prod(shape, dtype=np.int64)) * of.itemsize
        return raw[offset : offset + nbytes].view(of).view(shape)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def adopt(self, array: Any) -> Any:
        torch = self.torch
        try:
            if isinstance(array, torch.Tensor):
                view = array
            elif hasattr(array, "__dlpack__"):
                view = torch.from_dlpack(Unordered(array))
            else:
                view = torch.as_tensor(array, device=self.device)
        except Exception as err:
            raise BindError(f"{type(array).__name__} has no CUDA memory to bind: {err}") from None
        if view.device != self.device:
            raise BindError(
                f"it is on {view.device}, the step on {self.device}: move it there (x.to(device)), "
                "or compile for its device"
            )
        return view

    def layout(self, array: Any) -> Layout:
        name = str(array.dtype).removeprefix("torch.")
        return Layout(name, tuple(array.shape), tuple(array.stride()))


class PinnedBuffer:
    """Page-locked host memory, as a tensor that copies from it and as NumPy bytes."""

    def __init__(self, torch: Any, nbytes: int) -> None:
        self.tensor = torch.zeros(max(nbytes, 1), dtype=torch.uint8, pin_memory=True)
        self.array: np.ndarray = self.tensor.numpy()


class CudaEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """target: "cuda", "numba-cuda" or "triton". device: as torch names it (None: the current).

    Raises CompileError if torch, the driver, the device or the target's package is missing.
    """

    def __init__(self, target: str, device: Any = None) -> None:
        self.torch = torch = import_torch()
        self.target = target_of(target)
        try:
            number = torch.device("cuda" if device is None else device)
            if number.type != "cuda":
                raise CompileError(f"target {target!r} runs on a CUDA device, not on {number}")
            index = torch.cuda.current_device() if number.index is None else number.index
            capability = torch.cuda.get_device_capability(index)
        except (RuntimeError, AssertionError) as err:
            raise CompileError(f"no CUDA device {device!r}: {err}") from None
        if capability < MINIMUM:
            raise CompileError(
                f"{torch.cuda.get_device_name(index)} has compute capability "
                f"{'.'.join(map(str, capability))}; the least is {'.'.join(map(str, MINIMUM))}"
            )
        self.device = torch.device("cuda", index)
        self.memory = TorchMemory(torch, self.device)
        try:
            self.loader = import_module(self.target.loader)
            self.loader.require()
        except ImportError as err:
            raise CompileError(f"target {target!r}: {err}; it needs {self.target.needs}") from None
        self.side = torch.cuda.Stream(self.device)
        self.last: Any = None  # the stream of the last step

    def load(self, source: Source) -> Any:
        with self.torch.cuda.device(self.device):
            return self.loader.load(source)

    def launch(self, kernel: Any, context: int, first: int, last: int, blocks: int) -> None:
        with self.torch.cuda.device(self.device):
            stream = self.torch.cuda.current_stream(self.device).cuda_stream
            self.loader.launch(kernel, context, first, last, blocks, THREADS, stream)

    def host_buffer(self, nbytes: int) -> PinnedBuffer:
        return PinnedBuffer(self.torch, nbytes)

    def upload(self, target: Any, source: Any) -> None:
        target[: source.tensor.numel()].copy_(source.tensor, non_blocking=True)

    def event(self) -> CudaEvent:
        event = self.torch.cuda.Event()
        event.record(self.torch.cuda.current_stream(self.device))
        return CudaEvent(event)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        torch = self.torch
        with torch.cuda.device(self.device):
            now = torch.cuda.current_stream(self.device)
            graph = torch.cuda.CUDAGraph()
            self.side.wait_stream(now)
            with torch.cuda.stream(self.side):
                try:
                    # Nothing is allocated inside. Other threads may go on allocating meanwhile.
                    graph.capture_begin(capture_error_mode="thread_local")
                    try:
                        enqueue()
                    finally:
                        graph.capture_end()
                except RuntimeError as err:
                    raise CaptureError(
                        f"the step could not be captured: {err}. If another capture was running in "
                        "this thread, prepare batch shapes with executable() before it; if memory "
                        "ran out, keep fewer with max_executables"
                    ) from err
            now.wait_stream(self.side)
        replay: Callable[[], None] = graph.replay
        return replay

    def order(self) -> None:
        now = self.torch.cuda.current_stream(self.device)
        if self.last is not None and now != self.last:
            try:
                now.wait_stream(self.last)
            except RuntimeError as err:
                self.last = now
                raise CaptureError(
                    f"the stream of the previous step is gone ({err}): synchronize the device, "
                    "then replay again"
                ) from None
        self.last = now

    def capturing(self) -> bool:
        return bool(self.torch.cuda.is_current_stream_capturing())
