"""The step file: what is written comes back, and no damaged or hostile file gets further than an
error that says what is wrong."""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stepgraph import recording
from stepgraph.recording import MAGIC, RecordedStep, StepFileError, StepReader, StepWriter

HEADER = {
    "groups": [{"name": "attn", "kind": "attention", "block_size": 16, "max_blocks": 8}],
    "capacities": {"max_reqs": 4, "max_tokens": 64, "max_model_len": 128},
    "producer": "test",
}


def make_step(n: int) -> RecordedStep:
    arrays = {
        "query_start_loc": np.arange(n + 1, dtype=np.int32),
        "seq_lens": np.full(n, 40 + n, np.int32),
        "block_table/attn": np.arange(n * 3, dtype=np.int32).reshape(n, 3),
    }
    return RecordedStep({"num_reqs": n, "num_tokens": n}, arrays)


STEPS = [make_step(n) for n in (1, 3, 0, 2)]


def write(path: Path, steps: list[RecordedStep], header: dict = HEADER) -> list[int]:
    """Write the file; return its size after the header and after each step."""
    with StepWriter(path, header) as writer:
        sizes = [path.stat().st_size]
        for step in steps:
            writer.write(step.arrays, **step.ints)
            sizes.append(path.stat().st_size)  # readable at any moment: nothing waits in a buffer
    assert writer.steps == len(steps)
    return sizes


def assert_same(got: RecordedStep, want: RecordedStep) -> None:
    assert got.ints == want.ints
    assert list(got.arrays) == list(want.arrays)
    for name, array in want.arrays.items():
        assert got.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(got.arrays[name], array, strict=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.sgs"


def test_round_trip_and_second_iteration(path: Path) -> None:
    write(path, STEPS)
    reader = StepReader(path)
    assert reader.header == HEADER
    for _ in range(2):
        for got, want in zip(reader, STEPS, strict=True):
            assert_same(got, want)
    assert reader.truncated_bytes == 0
    assert all(a.flags.writeable for a in next(iter(reader)).arrays.values())


arrays = hnp.arrays(
    dtype=st.sampled_from(["bool", "int8", "uint8", "int16", "int32", "int64"]),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)
names = st.text(min_size=1, max_size=20)
int64 = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.builds(
            RecordedStep,
            # `arrays` and `self` are the method's own parameters.
            st.dictionaries(names.filter(lambda n: n not in ("arrays", "self")), int64, max_size=4),
            st.dictionaries(names, arrays, max_size=4),
        ),
        max_size=5,
    ),
    header=st.dictionaries(names, st.none() | st.booleans() | int64 | names, max_size=4),
)
def test_any_step_comes_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[RecordedStep], header: dict
) -> None:
    path = tmp_path_factory.mktemp("any") / "steps.sgs"
    write(path, steps, header)
    reader = StepReader(path)
    assert reader.header == header
    for got, want in zip(reader, steps, strict=True):
        assert_same(got, want)


def test_strided_and_big_endian_arrays_are_stored_by_value(path: Path) -> None:
    table = np.arange(24, dtype=np.int32).reshape(4, 6)
    with StepWriter(path, {}) as writer:
        writer.write({"part": table[::2, 1::2], "big": table.astype(">i4")})
    (step,) = StepReader(path)
    np.testing.assert_array_equal(step.arrays["part"], table[::2, 1::2])
    np.testing.assert_array_equal(step.arrays["big"], table)
    assert step.arrays["big"].dtype == np.int32


def test_repeated_tables_cost_little(path: Path) -> None:
    table = np.random.default_rng(0).integers(0, 2**31, (8, 64), dtype=np.int32)
    step = RecordedStep({"num_reqs": 8}, {"block_table/attn": table})
    sizes = write(path, [step, step])
    assert sizes[2] - sizes[1] < (sizes[1] - sizes[0]) // 10


def test_every_cut_keeps_the_steps_before_it(path: Path) -> None:
    sizes = write(path, STEPS)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        if cut < sizes[0]:
            with pytest.raises(StepFileError, match=r"cut within its header|not a step file"):
                StepReader(path)
            continue
        kept = max(i for i, size in enumerate(sizes) if size <= cut)
        reader = StepReader(path)
        for got, want in zip(reader, STEPS[:kept], strict=True):
            assert_same(got, want)
        assert reader.truncated_bytes == cut - sizes[kept]


def test_every_flipped_byte_is_noticed(path: Path) -> None:
    sizes = write(path, STEPS)
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        if position < sizes[0]:
            with pytest.raises(StepFileError):
                StepReader(path)
            continue
        intact = max(i for i, size in enumerate(sizes) if size <= position)
        with pytest.raises(StepFileError, match=f"step {intact} is damaged"):
            list(StepReader(path))


def test_steps_before_the_damage_are_read(path: Path) -> None:
    sizes = write(path, STEPS)
    damaged = bytearray(path.read_bytes())
    damaged[sizes[2] + 15] ^= 1
    path.write_bytes(damaged)
    steps = iter(StepReader(path))
    assert_same(next(steps), STEPS[0])
    assert_same(next(steps), STEPS[1])
    with pytest.raises(StepFileError, match="step 2 is damaged: its checksum does not fit"):
        next(steps)


def test_a_growing_file_is_read_as_far_as_it_is(path: Path) -> None:
    with StepWriter(path, HEADER) as writer:
        for n, step in enumerate(STEPS):
            assert len(list(StepReader(path))) == n
            writer.write(step.arrays, **step.ints)


def test_threads_may_share_a_writer(path: Path) -> None:
    with StepWriter(path, {}) as writer:

        def work(k: int) -> None:
            for i in range(50):
                writer.write({"a": np.full(9, k, np.int32)}, k=k, i=i)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seen = [(step.ints["k"], step.ints["i"]) for step in StepReader(path)]
    assert sorted(seen) == [(k, i) for k in range(4) for i in range(50)]


# Errors of the writer.


def test_writer_refuses_what_the_format_cannot_hold(path: Path) -> None:
    with StepWriter(path, {}) as writer:
        for arrays, ints, text in (
            ({"a": np.zeros(2, np.float32)}, {}, "dtype float32"),
            ({"a": np.array([None, {}])}, {}, "dtype object"),
            ({"a": np.zeros((1,) * 5, np.int32)}, {}, "at most 4 dims"),
            ({"": np.zeros(1, np.int32)}, {}, "a name has 1 to"),
            ({str(i): np.zeros(0, np.int8) for i in range(1025)}, {}, "at most 1024 arrays"),
            ({}, {"n": 2**63}, "does not fit 64 bits"),
            ({"a": np.zeros(2**26, np.int8)}, {}, "too large"),
        ):
            with pytest.raises(StepFileError, match=text):
                writer.write(arrays, **ints)
        writer.write({"a": np.ones(1, np.int32)}, n=1)  # the refusals left the file as it was
    (step,) = StepReader(path)
    assert step.ints == {"n": 1}


def test_writer_does_not_overwrite_unless_told(path: Path) -> None:
    write(path, STEPS)
    with pytest.raises(StepFileError, match="exists already"):
        StepWriter(path, HEADER)
    assert len(list(StepReader(path))) == len(STEPS)
    StepWriter(path, HEADER, overwrite=True).close()
    assert list(StepReader(path)) == []


@pytest.mark.parametrize("header", [{"a": {1, 2}}, {"a": float("nan")}])
def test_header_must_be_json(path: Path, header: dict) -> None:
    with pytest.raises(StepFileError, match="the header is not JSON"):
        StepWriter(path, header)
    assert not path.exists()


def test_closed_writer_and_missing_folder(path: Path) -> None:
    writer = StepWriter(path, {})
    writer.close()
    writer.close()
    with pytest.raises(StepFileError, match="closed"):
        writer.write({})
    with pytest.raises(StepFileError, match="cannot be written: No such file"):
        StepWriter(path.parent / "nowhere" / "x.sgs", {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_an_error_not_a_crash(path: Path) -> None:
    with pytest.raises(StepFileError, match="No space left"):
        StepWriter("/dev/full", {}, overwrite=True)
    assert Path("/dev/full").exists()  # what was there before stays
    writer = StepWriter(path, {})
    full = os.open("/dev/full", os.O_WRONLY)
    assert writer._file is not None
    os.dup2(full, writer._file.fileno())
    os.close(full)
    with pytest.raises(StepFileError, match="No space left"):
        writer.write({})
    with pytest.raises(StepFileError, match="closed"):
        writer.write({})


# Errors of the reader.


def prefix(version: int, header: bytes, crc: int | None = None) -> bytes:
    crc = zlib.crc32(header) if crc is None else crc
    return MAGIC + struct.pack("<III", version, len(header), crc) + header


def frame(payload: bytes, length: int | None = None) -> bytes:
    sizes = struct.pack("<II", len(payload) if length is None else length, zlib.crc32(payload))
    return sizes + struct.pack("<I", zlib.crc32(sizes)) + payload


def deflated(body: bytes) -> bytes:
    deflate = zlib.compressobj()
    return deflate.compress(body) + deflate.flush(zlib.Z_SYNC_FLUSH)


def packed(described: object, data: bytes = b"", text_length: int | None = None) -> bytes:
    """A frame whose checksums fit, so that only the content can be wrong."""
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    length = len(text) if text_length is None else text_length
    return frame(deflated(struct.pack("<I", length) + text + data))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not a step file"),
        (b"PK\x03\x04 something else", "not a step file"),
        (MAGIC[:5], "cut within its header"),
        (prefix(recording.VERSION + 1, b"anything"), "format 2, this stepgraph reads up to 1"),
        (MAGIC + struct.pack("<I", 7), "install a newer stepgraph"),
        (prefix(0, b"{}"), "format version 0"),
        (prefix(1, b"{}", crc=1), "checksum"),
        (MAGIC + struct.pack("<III", 1, 2**31, 0), "claims 2147483648 bytes"),
        (prefix(1, b"[1]"), "not a JSON object"),
        (prefix(1, b"\xff\xfe{"), "not a JSON object"),
        (prefix(1, b'{"a":' + b"[" * 200_000), "not a JSON object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_headers(path: Path, content: bytes, text: str) -> None:
    path.write_bytes(content)
    with pytest.raises(StepFileError, match=text) as caught:
        StepReader(path)
    assert str(path) in str(caught.value)


def one(name: object = "a", dtype: object = "int32", shape: object = (1,)) -> dict:
    return {"ints": {}, "arrays": [[name, dtype, shape]]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (frame(b"", length=2**27), "claims 134217728 bytes"),
        (frame(b"not zlib at all"), "compressed data is broken"),
        (frame(zlib.compress(b"\0\0\0\0")), "ends the stream"),
        (frame(deflated(bytes(2**26 + 1))), "unpacks to more than"),
        (frame(b""), "description is missing"),
        (packed(b"{}", text_length=9), "description is cut"),
        (packed(b"{}", text_length=2**32 - 1), "description is cut"),
        (packed(b"{"), "not the expected JSON"),
        (packed([1]), "not the expected JSON"),
        (packed({"ints": {}}), "not the expected JSON"),
        (packed({"ints": {}, "arrays": [0] * 1025}), "not the expected JSON"),
        (packed({"ints": {"n": 1.5}, "arrays": []}), "not a 64-bit integer"),
        (packed({"ints": {"n": True}, "arrays": []}), "not a 64-bit integer"),
        (packed({"ints": {"n": 2**63}, "arrays": []}), "not a 64-bit integer"),
        (packed({"ints": {}, "arrays": [["a", "int32"]]}), "not \\[name, dtype, shape\\]"),
        (packed(one(name=5)), "not a short text"),
        (packed(one(name="x" * 257)), "not a short text"),
        (packed(one(dtype="object")), "unknown dtype 'object'"),
        (packed(one(dtype="float64")), "unknown dtype"),
        (packed(one(dtype=["int32"])), "unknown dtype"),
        (packed(one(shape=[-1])), "impossible shape"),
        (packed(one(shape=[1.0])), "impossible shape"),
        (packed(one(shape=[1] * 5)), "impossible shape"),
        (packed(one(shape=[2**60])), "impossible shape"),
        (packed(one(shape=[2**26] * 4), bytes(64)), "array 'a' is cut"),
        (packed(one(), bytes(3)), "array 'a' is cut"),
        (packed(one(), bytes(5)), "1 bytes are left over"),
        (packed({"ints": {}, "arrays": [["a", "int8", [1]]] * 2}, bytes(2)), "there twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_frames(path: Path, content: bytes, text: str) -> None:
    path.write_bytes(prefix(1, b"{}") + content)
    with pytest.raises(StepFileError, match=f"step 0 is damaged: .*{text}"):
        list(StepReader(path))


def test_any_byte_of_a_bool_array_is_a_bool(path: Path) -> None:
    path.write_bytes(prefix(1, b"{}") + packed(one(dtype="bool", shape=[3]), b"\0\x01\x7f"))
    (step,) = StepReader(path)
    assert step.arrays["a"].view(np.uint8).tolist() == [0, 1, 1]


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(StepFileError, match="is a folder"):
        StepReader(tmp_path)
    with pytest.raises(StepFileError, match="cannot be read: No such file"):
        StepReader(tmp_path / "none.sgs")
    with pytest.raises(StepFileError, match="cannot be read"):
        StepReader("nul\0byte")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StepFileError, match="not a regular file"):
        StepReader(pipe)


def test_unreadable_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, [])

    def refuse(*args: object) -> None:  # root may read everything, so chmod would not do
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(recording, "open", refuse, raising=False)
    with pytest.raises(StepFileError, match="cannot be read: Permission denied"):
        StepReader(path)
