"""The step file (`.sgs`): real step inputs of an engine, recorded, to be replayed anywhere.

It holds lengths and block ids: no text, no token ids, no weights.

Layout (all integers little-endian):

    8 bytes   magic  89 53 47 53 0d 0a 1a 0a
    u32       format version
    u32 u32   length and CRC-32 of the header
    ...       header: one JSON object
    then, per step, one frame:
    u32 u32   length and CRC-32 of the payload
    u32       CRC-32 of the eight bytes before (so a damaged length is not taken for a cut tail)
    ...       payload: a piece of ONE zlib stream, sync-flushed at the end of each frame, so what
              repeats from step to step is stored as a back reference

A frame decompresses to a u32 length, a JSON object of that length,
`{"ints": {name: int}, "arrays": [[name, dtype, shape], ...]}`, and the arrays' bytes in that order,
C-contiguous, little-endian. Nothing in the file is ever executed or unpickled.

The header of a recording has

    groups       list of objects with the fields of `stepgraph.Group` (name, kind, block_size, ...)
    capacities   {"max_reqs": int, "max_tokens": int, "max_model_len": int}
    producer     free text: what wrote the file
    meta         optional object, free

and each step has

    ints         num_reqs, num_tokens
    arrays       query_start_loc       int32 [num_reqs + 1]
                 num_computed_tokens   int32 [num_reqs]
                 seq_lens              int32 [num_reqs]
                 num_prompt_tokens     int32 [num_reqs], optional
                 block_table/<group>   int32 [num_reqs, columns used], rows in batch order, one per
                                       group; `columns used` may differ from step to step

Frames are written as they come, each by one write: the file is readable at any moment. A tail that
was cut (the writer died, the disk filled) costs the last frame only; `StepReader.truncated_bytes`
says how many bytes were dropped. Damage anywhere else raises `StepFileError`.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

MAGIC = b"\x89SGS\r\n\x1a\n"
VERSION = 1

# Bounds on what a reader will allocate for a file it knows nothing about.
MAX_HEADER = 1 << 20
MAX_STEP = 1 << 26  # of a step's bytes, packed as well as unpacked
MAX_ARRAYS = 1024
MAX_NAME = 256
MAX_NDIM = 4

_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("bool", "int8", "uint8", "int16", "int32", "int64")
}
_U32 = struct.Struct("<I")
_PREFIX = struct.Struct("<III")  # version, header length, header CRC
_FRAME = struct.Struct("<III")  # payload length, payload CRC, CRC of the two


class StepFileError(ValueError):
    """A step file cannot be read or written; the text says which file, where, and why."""


@dataclass(frozen=True)
class RecordedStep:
    """One step: `ints` by name, `arrays` by name (see the module's text for the keys)."""

    ints: dict[str, int] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class StepWriter:
    """Appends steps to a new step file.

    path: must not exist unless `overwrite` is true (two engine processes never share a file).
    header: JSON-able object; see the module's text.

    Raises StepFileError when the file cannot be made. `write` may be called from any thread.
    """

    def __init__(
        self, path: str | os.PathLike[str], header: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        self.path = Path(path)
        self.steps = 0
        self._lock = threading.Lock()
        self._zlib = zlib.compressobj(6)
        text = _dump(header, "the header")
        if len(text) > MAX_HEADER:
            raise StepFileError(f"the header has {len(text)} bytes; at most {MAX_HEADER} fit")
        start = MAGIC + _PREFIX.pack(VERSION, len(text), zlib.crc32(text)) + text
        try:
            # Unbuffered: a frame is one write, so a reader never sees half of it for long.
            self._file: BinaryIO | None = open(  # noqa: SIM115
                self.path, "wb" if overwrite else "xb", buffering=0
            )
        except FileExistsError:
            raise StepFileError(f"{self.path}: exists already; choose another name") from None
        except OSError as error:
            raise StepFileError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            self._put(start)
        except BaseException:
            self._file.close()
            if not overwrite:  # then the file is ours, made a moment ago
                self.path.unlink(missing_ok=True)
            raise

    def write(self, arrays: Mapping[str, np.ndarray], **ints: int) -> None:
        """Append one step.

        arrays: integer or bool arrays by name, at most 4 dims each; copied before this returns.
        ints: 64-bit integers by name.

        Raises StepFileError for what the format cannot hold (the file is left as it was), for a
        closed writer and when the disk refuses (the file is then closed, its last frame cut off).
        """
        body = _encode(arrays, ints)
        with self._lock:
            if self._file is None:
                raise StepFileError(f"{self.path}: the writer is closed")
            try:
                payload = self._zlib.compress(body) + self._zlib.flush(zlib.Z_SYNC_FLUSH)
                sizes = struct.pack("<II", len(payload), zlib.crc32(payload))
                self._put(sizes + _U32.pack(zlib.crc32(sizes)) + payload)
            except BaseException:
                # The zlib stream is now ahead of the file: nothing more can be appended.
                self._close()
                raise
            self.steps += 1

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise StepFileError(f"{self.path}: cannot be written: {error.strerror}") from error

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Close the file; calling it twice is harmless."""
        with self._lock:
            self._close()

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class StepReader:
    """Reads a step file: `header`, then the steps by iteration (each iteration starts over).

    `truncated_bytes` is 0 until an iteration has reached the end of the file; then it is the number
    of bytes of a cut last frame.

    Raises StepFileError when the file is not a readable step file; an iteration raises it at the
    first damaged frame, after the steps before it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.truncated_bytes = 0
        with self._open() as file:
            self.header = self._read_header(file)
            self._start = file.tell()

    def _error(self, text: str) -> StepFileError:
        return StepFileError(f"{self.path}: {text}")

    def _open(self) -> BinaryIO:
        try:
            mode = os.stat(self.path).st_mode
            if stat.S_ISDIR(mode):
                raise self._error("is a folder, not a step file")
            if not stat.S_ISREG(mode):  # a pipe would block, a device never ends
                raise self._error("is not a regular file")
            return open(self.path, "rb")
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from error
        except ValueError as error:  # a NUL byte in the name
            if isinstance(error, StepFileError):
                raise
            raise self._error(f"cannot be read: {error}") from error

    def _read_header(self, file: BinaryIO) -> dict[str, Any]:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            if magic and MAGIC.startswith(magic):
                raise self._error("the file was cut within its header")
            raise self._error("is not a step file (it does not begin with the step-file mark)")
        prefix = file.read(_PREFIX.size)
        if len(prefix) >= _U32.size:
            (version,) = _U32.unpack_from(prefix)
            if version > VERSION:
                raise self._error(
                    f"has step-file format {version}, this stepgraph reads up to {VERSION}: "
                    "install a newer stepgraph"
                )
            if version < 1:
                raise self._error(f"the header is damaged (format version {version})")
        if len(prefix) < _PREFIX.size:
            raise self._error("the file was cut within its header")
        _, length, crc = _PREFIX.unpack(prefix)
        if length > MAX_HEADER:
            raise self._error(f"the header is damaged (it claims {length} bytes)")
        text = file.read(length)
        if len(text) < length:
            raise self._error("the file was cut within its header")
        if zlib.crc32(text) != crc:
            raise self._error("the header is damaged (its checksum does not fit)")
        header = _load(text)
        if not isinstance(header, dict):
            raise self._error("the header is not a JSON object")
        return header

    def __iter__(self) -> Iterator[RecordedStep]:
        with self._open() as file:
            file.seek(self._start)
            inflate = zlib.decompressobj()
            number = 0
            while True:
                payload = self._frame(file, number)
                if payload is None:
                    return
                try:
                    step = _decode(_inflate(inflate, payload))
                except ValueError as error:
                    raise self._error(f"step {number} is damaged: {error}") from None
                yield step
                number += 1

    def _frame(self, file: BinaryIO, number: int) -> bytes | None:
        """The payload of the next frame; None at the end, where a cut frame is counted."""
        head = file.read(_FRAME.size)
        if len(head) == _FRAME.size:
            length, crc, own = _FRAME.unpack(head)
            if zlib.crc32(head[:8]) != own:
                raise self._error(f"step {number} is damaged: its length does not fit its checksum")
            if length > MAX_STEP:
                raise self._error(f"step {number} is damaged: it claims {length} bytes")
            payload = file.read(length)
            if len(payload) == length:
                if zlib.crc32(payload) != crc:
                    raise self._error(f"step {number} is damaged: its checksum does not fit")
                return payload
            head += payload
        self.truncated_bytes = len(head)
        return None


def _dump(value: object, what: str) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StepFileError(f"{what} is not JSON: {error}") from None


def _load(text: bytes) -> Any:
    """The JSON value in `text`, or None when there is none (every caller wants an object)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _encode(arrays: Mapping[str, np.ndarray], ints: Mapping[str, int]) -> bytes:
    described: list[list[Any]] = []
    parts: list[bytes] = []
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.name not in _DTYPES:
            raise StepFileError(
                f"array {name!r} has dtype {array.dtype}; a step file holds {', '.join(_DTYPES)}"
            )
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or array.ndim > MAX_NDIM:
            raise StepFileError(
                f"array {name!r}: a name has 1 to {MAX_NAME} characters, "
                f"an array at most {MAX_NDIM} dims (it has {array.ndim})"
            )
        described.append([name, array.dtype.name, list(array.shape)])
        parts.append(array.astype(_DTYPES[array.dtype.name], copy=False).tobytes())
    if len(described) > MAX_ARRAYS:
        raise StepFileError(f"a step has at most {MAX_ARRAYS} arrays, not {len(described)}")
    plain = {}
    for name, value in ints.items():
        plain[name] = int(value)
        if not -(2**63) <= plain[name] < 2**63:
            raise StepFileError(f"int {name!r} = {value} does not fit 64 bits")
    text = _dump({"ints": plain, "arrays": described}, "the step")
    body = b"".join([_U32.pack(len(text)), text, *parts])
    # What zlib cannot compress grows by a few bytes in 10,000, so some room is left for that.
    if len(text) > MAX_HEADER or len(body) > MAX_STEP - (1 << 16):
        raise StepFileError(f"a step of {len(body)} bytes is too large for a step file")
    return body


def _inflate(stream: Any, payload: bytes) -> bytes:
    try:
        body: bytes = stream.decompress(payload, MAX_STEP)
    except zlib.error:
        raise ValueError("its compressed data is broken") from None
    if stream.unconsumed_tail or stream.eof:
        raise ValueError(f"it unpacks to more than {MAX_STEP} bytes or ends the stream")
    return body


def _decode(body: bytes) -> RecordedStep:
    """The step in `body`. Raises ValueError with the reason; trusts nothing in it."""
    if len(body) < _U32.size:
        raise ValueError("its description is missing")
    end = _U32.size + _U32.unpack_from(body)[0]
    if end > min(len(body), MAX_HEADER):
        raise ValueError("its description is cut or too long")
    described = _load(body[_U32.size : end])
    ints = described.get("ints") if isinstance(described, dict) else None
    listed = described.get("arrays") if isinstance(described, dict) else None
    if not isinstance(ints, dict) or not isinstance(listed, list) or len(listed) > MAX_ARRAYS:
        raise ValueError("its description is not the expected JSON")
    for name, value in ints.items():
        if type(value) is not int or not -(2**63) <= value < 2**63:
            raise ValueError(f"int {name!r} is not a 64-bit integer")
    arrays: dict[str, np.ndarray] = {}
    for entry in listed:
        name, dtype, shape = _described(entry)
        if name in arrays:
            raise ValueError(f"array {name!r} is there twice")
        size = math.prod(shape) * dtype.itemsize
        if size > len(body) - end:
            raise ValueError(f"array {name!r} is cut")
        flat = np.frombuffer(body, dtype, math.prod(shape), end)
        # A copy in native order: writable, and any byte but 0 is true, as NumPy expects of bools.
        native = dtype.newbyteorder("=")
        values = flat.view(np.uint8) != 0 if dtype == np.bool_ else flat.astype(native)
        arrays[name] = values.reshape(shape)
        end += size
    if end != len(body):
        raise ValueError(f"{len(body) - end} bytes are left over")
    return RecordedStep(ints, arrays)


def _described(entry: object) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    if not isinstance(entry, list) or len(entry) != 3:
        raise ValueError("an array's description is not [name, dtype, shape]")
    name, dtype, shape = entry
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ValueError("an array's name is not a short text")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"array {name!r} has unknown dtype {str(dtype)[:40]!r}")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_NDIM
        or any(type(n) is not int or not 0 <= n <= MAX_STEP for n in shape)
    ):
        raise ValueError(f"array {name!r} has an impossible shape")
    return name, _DTYPES[dtype], tuple(shape)
