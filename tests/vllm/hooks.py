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


def corrupt_compiled() -> dict[str, Any]:
    """From the 12th compiled step on, one state index of the compiled step is wrong."""
    from stepgraph.interop.vllm.decode import DecodeStep

    inner, seen = DecodeStep.build, {"planted": 0, "steps": 0}

    def build(self: Any, shape: Any, num_reqs: int, slot_mappings: Any) -> Any:
        out = inner(self, shape, num_reqs, slot_mappings)
        seen["steps"] += 1
        if out is not None and seen["steps"] >= 12 and num_reqs > 1:
            made = next(m for m in out.values() if hasattr(m, "state_indices_tensor_d"))
            made.state_indices_tensor_d[0] = made.state_indices_tensor_d[1]
            seen["planted"] += 1
        return out

    DecodeStep.build = build
    return seen


def corrupt_compiled_at_once() -> dict[str, Any]:
    """Every compiled step has a wrong sequence length bound."""
    from stepgraph.interop.vllm.decode import DecodeStep

    inner, seen = DecodeStep.build, {"planted": 0}

    def build(self: Any, shape: Any, num_reqs: int, slot_mappings: Any) -> Any:
        out = inner(self, shape, num_reqs, slot_mappings)
        if out is not None:
            made = next(m for m in out.values() if hasattr(m, "max_seq_len"))
            made.max_seq_len += 1
            seen["planted"] += 1
        return out

    DecodeStep.build = build
    return seen


def raise_in_compiled() -> dict[str, Any]:
    """The compiled step raises at its 5th, 9th and each later call."""
    from stepgraph.interop.vllm.decode import DecodeStep

    inner, seen = DecodeStep.build, {"calls": 0, "raised": 0}

    def build(self: Any, shape: Any, num_reqs: int, slot_mappings: Any) -> Any:
        seen["calls"] += 1
        if seen["calls"] == 5 or seen["calls"] >= 9:
            seen["raised"] += 1
            raise RuntimeError("planted")
        return inner(self, shape, num_reqs, slot_mappings)

    DecodeStep.build = build
    return seen


def raise_in_attach() -> dict[str, Any]:
    """Nothing can be compiled."""
    from stepgraph.interop.vllm import decode

    def decode_graph(*_: Any) -> Any:
        raise RuntimeError("planted")

    decode.decode_graph = decode_graph
    return {}


def close_the_recorder() -> dict[str, Any]:
    """The step file can no longer be written to after five steps, as on a full disk."""
    from stepgraph.interop.vllm.record import Recorder

    inner, seen = Recorder.write, {"calls": 0}

    def write(self: Any, num_reqs: int, num_tokens: int) -> None:
        seen["calls"] += 1
        if seen["calls"] == 6:
            self.close()
        inner(self, num_reqs, num_tokens)

    Recorder.write = write
    return seen


def native_raises() -> dict[str, Any]:
    """vLLM's own code raises on a step that is being compared: its exception must come through."""
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder as Builder

    inner = Builder.build

    def build(self: Any, prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
        if common.max_query_len == 1:
            raise ZeroDivisionError("vLLM's own fault")
        return inner(self, prefix, common, *args, **kwargs)

    Builder.build = build
    return {}


def what_is_loaded() -> dict[str, Any]:
    """Which of the compiler's heavy packages are loaded before the engine exists."""
    import sys

    return {name: name in sys.modules for name in ("numba", "llvmlite", "stepgraph.interop.vllm")}


def replace_tables() -> dict[str, Any]:
    """At the 8th call the runner's block tables move to other memory, as after a new cache
    layout."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inner, seen = GPUModelRunner._build_attention_metadata, {"calls": 0}

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen["calls"] += 1
        if seen["calls"] == 8:
            tables = self.input_batch.block_table
            fresh = object.__new__(type(tables))
            fresh.__dict__.update(tables.__dict__)
            fresh.block_tables = []
            for table in tables.block_tables:
                moved = object.__new__(type(table))
                moved.__dict__.update(table.__dict__)
                buffer = object.__new__(type(table.block_table))
                buffer.cpu = buffer.gpu = table.block_table.cpu.clone()
                buffer.np = buffer.cpu.numpy()
                moved.block_table = buffer
                table.block_table.cpu.fill_(1)  # who still reads the old tables is found out
                fresh.block_tables.append(moved)
            self.input_batch.block_table = fresh
        return inner(self, *args, **kwargs)

    GPUModelRunner._build_attention_metadata = build
    return seen


def random_batches() -> dict[str, Any]:
    """Once the engine decodes, thousands of random states of the runner go through vLLM's builders
    and the compiled step, and every field is compared."""
    import random

    import numpy as np

    from stepgraph.interop.vllm.compare import differences
    from stepgraph.interop.vllm.v1 import Attachment

    inner = Attachment.build
    seen: dict[str, Any] = {"batches": 0, "differences": [], "first_chunks": 0}

    def build(self: Any, num_reqs: int, slot_mappings: Any, native: Any) -> Any:
        if seen["batches"] == 0 and num_reqs >= 3:
            check(self, slot_mappings)
        return inner(self, num_reqs, slot_mappings, native)

    def check(attached: Any, slot_mappings: Any) -> None:
        runner, step = attached.runner, attached.step
        batch = runner.input_batch
        original = runner.__class__._build_attention_metadata
        while hasattr(original, "__wrapped__"):
            original = original.__wrapped__
        tables = [t.get_numpy_array() for t in batch.block_table.block_tables]
        state = [
            batch.num_computed_tokens_cpu,
            batch.num_prompt_tokens,
            runner.seq_lens.numpy(),
            runner.optimistic_seq_lens_cpu.numpy(),
            runner.query_start_loc.np,
            *tables,
        ]
        saved = [a.copy() for a in state]
        rng = np.random.default_rng(7)
        longest = runner.max_model_len
        try:
            while seen["batches"] < BATCHES:
                n = random.Random(seen["batches"]).randint(1, runner.max_num_reqs)
                edges = [1, 2, 127, 128, 129, 255, 256, 257, longest - 1, longest]
                lens = rng.integers(1, longest + 1, n)
                lens = np.where(rng.random(n) < 0.3, rng.choice(edges, n), lens)
                prompts = np.where(rng.random(n) < 0.9, rng.integers(1, lens + 1), longest)
                for table in tables:  # stale rows and columns stay as an earlier round left them
                    table[:n] = rng.integers(0, 2**31 - 1, (n, table.shape[1]))
                state[0][:n], state[1][:n] = lens - 1, prompts
                state[2][:n] = state[3][:n] = lens
                state[4][: n + 1] = np.arange(n + 1)
                slots = dict.fromkeys(slot_mappings, runner.positions[:n])
                theirs, _ = original(runner, n, n, 1, slot_mappings=slots)
                ours = step.build(step.shape(n), n, slots)
                seen["batches"] += 1
                if ours is None:
                    seen["first_chunks"] += 1
                    assert any((lens == 1) & (prompts > 0))
                    continue
                seen["differences"] += differences(theirs, ours)
        finally:
            for array, content in zip(state, saved, strict=True):
                array[:] = content

    Attachment.build = build
    return seen


BATCHES = 4000  # a few seconds
