"""`stepgraph bench vllm`: a real vLLM engine with the shim off and on, in turn.

Each run is a process of its own: `batch` requests start together and decode `tokens` tokens each.
Timed are every decode step's `_build_attention_metadata` and the whole engine step around it. The
last run compares the two on every step (`verify`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepgraph.progress import Progress

PROMPT = 16  # tokens of the longest prompt
TIMEOUT = 1800  # seconds for one run


class BenchError(Exception):
    """A run failed; the text says why."""


def main(args: argparse.Namespace) -> int:
    """Run it as the command line says; the exit status."""
    try:
        with Progress(None) as progress:
            result = bench(
                args.model,
                batch=args.batch,
                tokens=args.tokens,
                repeat=args.repeat,
                prefix_caching=not args.no_prefix_caching,
                progress=progress,
            )
    except BenchError as err:
        print(f"stepgraph: {err}", file=sys.stderr)
        return 2
    print(json.dumps(result) if args.json else _table(result))
    wrong = result["mismatches"] or result["errors"] or not result["tokens_equal"]
    return 1 if wrong else 0


def bench(
    model: str,
    *,
    batch: int = 8,
    tokens: int = 64,
    repeat: int = 3,
    prefix_caching: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Medians in us, ratios and counters. Raises BenchError if vLLM or the model is not there, or a
    run fails."""
    if not (Path(model) / "config.json").is_file():
        raise BenchError(f"{model}: no config.json there; --model wants a model's folder")
    if importlib.util.find_spec("vllm") is None:
        raise BenchError("vLLM is not installed here: pip install vllm")
    job = {
        "model": str(Path(model).resolve()),
        "batch": batch,
        "tokens": tokens,
        "prefix_caching": prefix_caching,
    }
    modes = ["off", "on"] * repeat + ["verify"]
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": [], "verify": []}
    progress = progress or Progress(False)
    progress.start("vLLM, off and on in turn", len(modes))
    for mode in modes:
        runs[mode].append(_run(job, mode))
        progress.advance()
    return _result(job, runs)


def _run(job: dict[str, Any], mode: str) -> dict[str, Any]:
    env = dict(os.environ) | {"STEPGRAPH_VLLM": mode, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.TemporaryDirectory() as scratch:
        out, log = Path(scratch) / "out.json", Path(scratch) / "log"
        code = "import sys; from stepgraph.bench_vllm import child; child(*sys.argv[1:])"
        command = [sys.executable, "-c", code, json.dumps(job), str(out)]
        with open(log, "wb") as sink:
            # From the scratch folder: a checkout's own folders must not shadow packages.
            try:
                done = subprocess.run(
                    command, env=env, cwd=scratch, stdout=sink, stderr=sink, timeout=TIMEOUT
                )
            except subprocess.TimeoutExpired:
                raise BenchError(f"a run took longer than {TIMEOUT} s") from None
        if done.returncode or not out.exists():
            tail = log.read_text(errors="replace").strip().splitlines()[-12:]
            raise BenchError("vLLM failed:\n  " + "\n  ".join(tail))
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def _result(job: dict[str, Any], runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def median(mode: str, what: str) -> float:
        values = [v for run in runs[mode] for v in run[what]]
        if not values:
            raise BenchError(f"no decode step of {job['batch']} requests was seen")
        return statistics.median(values) * 1e6

    native, compiled = median("off", "builds"), median("on", "builds")
    native_step, compiled_step = median("off", "steps"), median("on", "steps")
    reasons: Counter[str] = Counter()
    for run in runs["on"]:
        reasons.update(run["counters"]["native"])
    made = sum(run["counters"]["compiled"] for run in runs["on"])
    others = sum(n for reason, n in reasons.items() if reason != "prefill")
    shim = [*runs["on"], *runs["verify"]]
    reference = runs["off"][0]["tokens"]
    return {
        **job,
        "repeat": len(runs["on"]),
        "groups": runs["on"][0]["groups"],
        "native_us": round(native, 2),
        "compiled_us": round(compiled, 2),
        "ratio": round(native / compiled, 2),
        "native_step_us": round(native_step, 1),
        "compiled_step_us": round(compiled_step, 1),
        "step_ratio": round(native_step / compiled_step, 4),
        "native_share_of_step": round(native / native_step, 4),
        "compiled_share_of_step": round(compiled / compiled_step, 4),
        "compiled_step_share": round(made / max(made + others, 1), 4),
        "steps_verified": sum(run["counters"]["verified"] for run in shim),
        "mismatches": sum(run["counters"]["mismatches"] for run in shim),
        "errors": sum(run["counters"]["errors"] for run in shim),
        "native_reasons": dict(reasons),
        "status": runs["on"][0]["counters"]["status"],
        "tokens_equal": all(r["tokens"] == reference for mode in runs.values() for r in mode),
        "vllm": runs["on"][0]["vllm"],
        "machine": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
    }


def _table(r: dict[str, Any]) -> str:
    caching = "on" if r["prefix_caching"] else "off"
    reasons = ", ".join(f"{k} {v}" for k, v in r["native_reasons"].items()) or "none"
    same = "the same" if r["tokens_equal"] else "DIFFERENT"
    rows = [
        ("", "native", "stepgraph", "ratio"),
        (
            "_build_attention_metadata",
            f"{r['native_us']:.1f} us",
            f"{r['compiled_us']:.1f} us",
            f"{r['ratio']:.1f}x",
        ),
        (
            "whole engine step",
            f"{r['native_step_us']:.0f} us",
            f"{r['compiled_step_us']:.0f} us",
            f"{r['step_ratio']:.3f}x",
        ),
        (
            "share of the step",
            f"{r['native_share_of_step']:.1%}",
            f"{r['compiled_share_of_step']:.1%}",
            "",
        ),
    ]
    head = (
        f"{Path(r['model']).name}: {r['groups']} KV-cache groups, batch {r['batch']}, "
        f"prefix caching {caching}, vLLM {r['vllm']}, {r['machine']}; medians of decode steps"
    )
    table = [f"{a:28}{b:>12}{c:>12}{d:>9}".rstrip() for a, b, c, d in rows]
    compiled = f"decode steps compiled: {r['compiled_step_share']:.1%}; left to vLLM: {reasons}"
    checked = (
        f"{r['steps_verified']} steps compared field by field, {r['mismatches']} mismatches, "
        f"{r['errors']} errors; tokens are {same} (shim: {r['status']})"
    )
    return "\n".join([head, "", *table, "", compiled, checked])


def child(text: str, out: str) -> None:
    """One run, in a process of its own. text: the job as JSON; out: the file for the result."""
    import vllm
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.llm_engine import LLMEngine

    job = json.loads(text)
    load_general_plugins()
    folder = Path(job["model"])
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    wanted = max(512, PROMPT + job["tokens"] + 1)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=job["model"],
            load_format="auto" if any(folder.glob("*.safetensors")) else "dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=min(wanted, config.get("max_position_embeddings", wanted)),
            max_num_seqs=job["batch"],
            enable_prefix_caching=job["prefix_caching"],
            disable_log_stats=True,
            seed=0,
        )
    )
    seen = _watch(job["batch"])
    vocabulary = config.get("vocab_size", 512)
    for i in range(job["batch"]):
        prompt = [(7 * i + 3 * k) % (vocabulary - 4) + 3 for k in range(PROMPT - i % (PROMPT // 2))]
        params = SamplingParams(
            temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False
        )
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    tokens: dict[str, list[int]] = {}
    steps = []
    while engine.has_unfinished_requests():
        before = len(seen.builds)
        start = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - start
        if len(seen.builds) > before:
            steps.append(seconds)
        for output in outputs:
            tokens[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
    from stepgraph.interop.vllm import counters

    result = {
        "builds": seen.builds,
        "steps": steps,
        "tokens": [tokens[str(i)] for i in range(job["batch"])],
        "counters": counters(),
        "groups": seen.groups,
        "vllm": vllm.__version__,
    }
    Path(out).write_text(json.dumps(result))


@dataclass
class _Seen:
    """builds: seconds of each build of a full decode step; groups: KV-cache groups."""

    builds: list[float] = field(default_factory=list)
    groups: int = 0


def _watch(batch: int) -> _Seen:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inner, seen = GPUModelRunner._build_attention_metadata, _Seen()

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.groups = len(self.kv_cache_config.kv_cache_groups)
        start = time.perf_counter()
        result = inner(self, *args, **kwargs)
        if kwargs.get("max_query_len") == 1 and kwargs.get("num_reqs") == batch:
            seen.builds.append(time.perf_counter() - start)
        return result

    GPUModelRunner._build_attention_metadata = build
    return seen
