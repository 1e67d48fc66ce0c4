"""Checkpoint directories with seeded weights, large enough that outputs depend on every state.

vLLM's dummy weights are tiny: each model then repeats one token whatever its caches hold, and a
test of tokens proves nothing. Here the residual stream is dominated by the layers, the recurrent
states decay slowly and the skip connection around them is weak, so one wrong index or slot shows.

    python tests/vllm/checkpoint.py granite4-tiny /tmp/granite4-tiny
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "models"
# Soft attention over all tokens; the few attention layers count as much as many recurrent ones.
GAINS = {"q_proj": 1.0, "k_proj": 1.0, "o_proj": 16.0, "lm_head": 3.0}


def _weight(name: str, shape: tuple[int, ...], seed: int) -> Any:
    import numpy as np

    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    leaf = name.rsplit(".", 2)[-2:]
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.02, 0.5, shape))
    if name.endswith("dt_bias"):
        return np.log(np.expm1(rng.uniform(0.1, 0.6, shape)))
    if name.endswith(".D"):
        return rng.uniform(-0.1, 0.1, shape)
    if "conv1d" in leaf:
        return (
            rng.uniform(-0.7, 0.7, shape) if leaf[-1] == "weight" else 0.1 * rng.normal(size=shape)
        )
    if len(shape) == 1:
        return 1.0 + 0.1 * rng.normal(size=shape)
    if "embed" in name:
        return rng.normal(size=shape)
    gain = next((g for part, g in GAINS.items() if part in name), 1.5)
    return gain / np.sqrt(shape[-1]) * rng.normal(size=shape)


def build(model: str, target: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors of `model` (a folder of `models/`) to `target`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    source = MODELS / model
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    tied = set(getattr(skeleton, "_tied_weights_keys", None) or ())
    tied = tied if skeleton.config.tie_word_embeddings else set()
    weights = {
        name: torch.tensor(_weight(name, tuple(p.shape), seed), dtype=p.dtype).contiguous()
        for name, p in skeleton.state_dict().items()
        if name not in tied
    }
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", target / "config.json")
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


def cached(model: str, seed: int = 0) -> Path:
    """The checkpoint of `model`, built once per machine under the temporary folder."""
    config = json.loads((MODELS / model / "config.json").read_text())
    key = json.dumps([seed, config, Path(__file__).read_text()], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    target = Path(tempfile.gettempdir()) / "stepgraph-checkpoints" / f"{model}-{digest}"
    if not (target / "model.safetensors").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / "model"
            # A process of its own: the caller keeps torch and transformers out of its memory.
            command = [sys.executable, __file__, model, str(built), str(seed)]
            subprocess.run(command, check=True, cwd=scratch, stdout=subprocess.DEVNULL)
            shutil.rmtree(target, ignore_errors=True)
            built.rename(target)
    return target


if __name__ == "__main__":
    sys.path.pop(0)  # this folder would shadow installed packages
    print(build(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])))
