"""One real vLLM engine in a process of its own: a scripted workload in, tokens and their
log-probabilities out.

Requests join at chosen engine steps and leave when they have their tokens, so batches grow, shrink
and reorder the way the script says, every time. Importing vLLM takes most of a run's time, so a
server process imports it once (no plugin, no platform set up) and forks a child for each run;
`fresh=True` starts a new interpreter instead.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT = 300
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    # One thread: the models are tiny, and waiting threads would spin on a busy machine.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Request:
    """`prompt` joins before engine step `at` and leaves after `tokens` generated tokens."""

    prompt: Sequence[int]
    tokens: int
    at: int = 0


@dataclass(frozen=True)
class Result:
    """tokens[i], logprobs[i]: of request i; each logprob entry is {token: float} of one position.

    builds: one (num_reqs, max_query_len, seconds) per call of `_build_attention_metadata`.
    counters: those of the shim, {} where stepgraph is not installed. log: the engine's stderr.
    """

    tokens: list[list[int]]
    logprobs: list[list[dict[str, float]]]
    builds: list[tuple[int, int, float]]
    counters: dict[str, Any]
    log: str
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def decode_builds(self) -> int:
        return sum(1 for _, query, _ in self.builds if query == 1)


def run(
    model: str | Path,
    requests: Iterable[Request],
    *,
    mode: str | None = None,
    prefix_caching: bool = False,
    hook: str | None = None,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    **engine_args: Any,
) -> Result:
    """Run `requests` through a new engine on the checkpoint folder `model`.

    mode: the value of STEPGRAPH_VLLM (None: unset). hook: "file.py:function" of this folder, called
    in the child after plugins are loaded and before the engine exists; what it returns (a dict,
    read at the end) is `Result.extra`. Raises RuntimeError with the child's output if it fails.
    """
    child_env = {k: v for k, v in os.environ.items() if not k.startswith(("STEPGRAPH", "VLLM"))}
    child_env |= ENVIRONMENT | dict(env or {})
    if mode is not None:
        child_env["STEPGRAPH_VLLM"] = mode
    with tempfile.TemporaryDirectory() as scratch:
        job = {
            "model": str(model),
            "requests": [asdict(r) for r in requests],
            "hook": hook,
            "engine_args": {"enable_prefix_caching": prefix_caching, **engine_args},
            "env": child_env,
            "cwd": scratch,
            "log": f"{scratch}/log",
            "out": f"{scratch}/out.json",
        }
        path = Path(scratch) / "job.json"
        path.write_text(json.dumps(job))
        code = _run_fresh(path, job) if fresh else _server().run(path)
        log = Path(job["log"]).read_text(errors="replace")
        if code or not Path(job["out"]).exists():
            raise RuntimeError(f"the engine failed (exit {code}):\n{log[-8000:]}")
        out = json.loads(Path(job["out"]).read_text())
    out["builds"] = [tuple(b) for b in out["builds"]]
    return Result(log=log, **out)


def _run_fresh(path: Path, job: dict[str, Any]) -> int:
    with open(job["log"], "wb") as log:
        command = [sys.executable, __file__, str(path)]
        return subprocess.run(
            command, env=job["env"], cwd=job["cwd"], stdout=log, stderr=log, timeout=TIMEOUT
        ).returncode


class _Server:
    def __init__(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("STEPGRAPH", "VLLM"))}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long-lived as the process)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--server"],
            env=env | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        atexit.register(self.process.kill)

    def run(self, path: Path) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            code = self.process.wait(TIMEOUT)
            self.errors.seek(0)
            log = self.errors.read()[-4000:].decode(errors="replace")
            raise RuntimeError(f"the engine server is gone (exit {code}):\n{log}")
        return int(answer)


def _server() -> _Server:
    global _SERVER
    if _SERVER is None or _SERVER.process.poll() is not None:
        _SERVER = _Server()
    return _SERVER


_SERVER: _Server | None = None


# -- the child -----------------------------------------------------------------------------------


def _load_hook(where: str) -> Any:
    file, name = where.split(":")
    path = Path(__file__).parent / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _watch_builds(builds: list[tuple[int, int, float]]) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inner = GPUModelRunner._build_attention_metadata

    @functools.wraps(inner)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = inner(self, *args, **kwargs)
        builds.append((kwargs["num_reqs"], kwargs["max_query_len"], time.perf_counter() - start))
        return result

    GPUModelRunner._build_attention_metadata = build  # type: ignore[method-assign]


def _child(spec: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.llm_engine import LLMEngine

    load_general_plugins()
    extra = _load_hook(spec["hook"])() if spec["hook"] else {}
    args = {
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
        "seed": 0,
        **spec["engine_args"],
    }
    engine = LLMEngine.from_engine_args(EngineArgs(model=spec["model"], **args))
    builds: list[tuple[int, int, float]] = []
    _watch_builds(builds)

    pending = sorted(enumerate(spec["requests"]), key=lambda item: item[1]["at"])
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[dict[str, float]]] = {}
    step = 0
    while pending or engine.has_unfinished_requests():
        while pending and pending[0][1]["at"] <= step:
            index, request = pending.pop(0)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request["tokens"],
                logprobs=2,
                ignore_eos=True,
                detokenize=False,
            )
            engine.add_request(str(index), {"prompt_token_ids": request["prompt"]}, params)
        for output in engine.step():
            completion = output.outputs[0]
            index = int(output.request_id.split("-")[0])
            tokens[index] = list(completion.token_ids)
            logprobs[index] = [
                {str(token): entry.logprob for token, entry in position.items()}
                for position in completion.logprobs
            ]
        step += 1
    try:
        from stepgraph.interop.vllm import counters

        counted = counters()
    except ImportError:
        counted = {}
    result = {
        "tokens": [tokens[i] for i in range(len(spec["requests"]))],
        "logprobs": [logprobs[i] for i in range(len(spec["requests"]))],
        "builds": builds,
        "counters": counted,
        "extra": extra or {},
    }
    Path(spec["out"]).write_text(json.dumps(result))


def _serve() -> None:
    # Answers go to the real stdout; whatever libraries print must not mix with them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import SamplingParams  # noqa: F401
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

    for line in sys.stdin:
        job = json.loads(Path(line.strip()).read_text())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                log = os.open(job["log"], os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ.clear()
                os.environ.update(job["env"])
                os.chdir(job["cwd"])
                _child(job)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


if __name__ == "__main__":
    # This folder would shadow installed packages (and the repository root holds "kernels").
    sys.path.pop(0)
    if sys.argv[1] == "--server":
        _serve()
    else:
        _child(json.loads(Path(sys.argv[1]).read_text()))
