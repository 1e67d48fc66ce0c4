"""Steps of a V1 runner as a step file: lengths and block ids, no tokens."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from stepgraph._version import __version__
from stepgraph.pipeline.groups import Group
from stepgraph.recording import StepWriter

_numbers = itertools.count()


class Recorder:
    """Writes each step of `runner` to a new file in `directory`; `path` says which.

    Raises StepFileError when the file cannot be written.
    """

    def __init__(self, runner: Any, directory: Path, what: str = "steps") -> None:
        from vllm import __version__ as vllm_version

        self.runner = runner
        self.groups = describe_groups(runner)
        directory.mkdir(parents=True, exist_ok=True)
        header = {
            "groups": [g.to_dict() for g in self.groups.values()],
            "capacities": {
                "max_reqs": int(runner.max_num_reqs),
                "max_tokens": int(runner.max_num_tokens),
                "max_model_len": int(runner.max_model_len),
            },
            "producer": f"stepgraph {__version__} in vLLM {vllm_version}",
            "meta": {"model_type": str(runner.model_config.hf_config.model_type)},
        }
        name = f"stepgraph-{what}-{os.getpid()}-{next(_numbers)}.sgs"
        self.path = directory / name
        self._writer = StepWriter(self.path, header)

    def write(self, num_reqs: int, num_tokens: int) -> None:
        """Append the step that the runner is about to run."""
        runner, batch = self.runner, self.runner.input_batch
        seq_lens = runner.optimistic_seq_lens_cpu.numpy()[:num_reqs]
        longest = int(seq_lens.max(initial=1))
        arrays: dict[str, np.ndarray] = {
            "query_start_loc": runner.query_start_loc.np[: num_reqs + 1],
            "num_computed_tokens": batch.num_computed_tokens_cpu[:num_reqs],
            "seq_lens": seq_lens,
            "num_prompt_tokens": batch.num_prompt_tokens[:num_reqs],
        }
        for gid, group in self.groups.items():
            used = group.max_blocks
            if group.kind == "attention" or group.cache_mode != "none":
                used = min(-(-longest // group.block_size), used)
            table = batch.block_table[gid].get_numpy_array()
            arrays[f"block_table/{group.name}"] = table[:num_reqs, :used]
        self._writer.write(arrays, num_reqs=num_reqs, num_tokens=num_tokens)

    def close(self) -> None:
        self._writer.close()


def describe_groups(runner: Any) -> dict[int, Group]:
    """{index: description} of the runner's KV-cache groups that have a block table."""
    from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, MambaSpec, SlidingWindowSpec

    groups = {}
    for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, EncoderOnlyAttentionSpec):
            continue
        width = runner.input_batch.block_table[gid].get_numpy_array().shape[1]
        if isinstance(spec, MambaSpec):
            groups[gid] = Group(
                f"recurrent {gid}",
                kind="recurrent",
                block_size=spec.block_size,
                max_blocks=width,
                cache_mode=spec.mamba_cache_mode,
            )
        else:
            groups[gid] = Group(
                f"attention {gid}",
                block_size=spec.block_size,
                max_blocks=width,
                window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
            )
    return groups
