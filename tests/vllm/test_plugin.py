"""The plugin around the engine: settings, versions it does not know, coming and going."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from . import checkpoint, engine
from .workloads import joining_and_leaving

pytestmark = pytest.mark.vllm


def python(code: str, folder: Path, **env: str) -> str:
    """The output of a new interpreter; it fails the test if that fails."""
    clean = {k: v for k, v in engine.os.environ.items() if not k.startswith(("STEPGRAPH", "VLLM"))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=clean | engine.ENVIRONMENT | env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_uninstall_restores_every_attribute(tmp_path: Path) -> None:
    python(
        """
        from stepgraph.interop import vllm as shim
        from stepgraph.interop.vllm.settings import Settings
        import vllm.v1.worker.gpu_model_runner as module

        cls = module.GPUModelRunner
        before = dict(vars(cls))
        shim.install(Settings("on"))
        assert shim.counters()["status"] == "installed", shim.counters()
        changed = {k for k in vars(cls) if vars(cls)[k] is not before.get(k)}
        assert changed == {"_build_attention_metadata", "initialize_kv_cache"}, changed
        shim.install(Settings("on"))  # a second time changes nothing
        assert shim.uninstall()
        assert dict(vars(cls)) == before

        # Wrapped by somebody else after us: their wrapper is left alone.
        shim.install(Settings("on"))
        ours = cls._build_attention_metadata
        cls._build_attention_metadata = lambda self, *a, **k: ours(self, *a, **k)
        theirs = cls._build_attention_metadata
        assert not shim.uninstall()
        assert cls._build_attention_metadata is theirs
        """,
        tmp_path,
    )


def test_it_waits_for_the_runners_module(tmp_path: Path) -> None:
    python(
        """
        import sys
        from stepgraph.interop import vllm as shim

        shim.register()
        assert shim.counters()["status"] == "waiting for vLLM", shim.counters()
        assert not {"vllm", "torch", "numba", "llvmlite"} & set(sys.modules)
        import vllm.v1.worker.gpu_model_runner as module
        assert shim.counters()["status"] == "installed", shim.counters()
        assert hasattr(module.GPUModelRunner._build_attention_metadata, "__wrapped__")
        assert len([f for f in sys.meta_path if "stepgraph" in type(f).__module__]) == 0
        """,
        tmp_path,
        STEPGRAPH_VLLM="on",
    )


@pytest.mark.parametrize(
    "change",
    [
        "module.GPUModelRunner._build_attention_metadata = lambda self, num_tokens: None",
        "known.V1['0.32.0'][next(iter(known.V1['0.32.0']))] = '0' * 16",
        "known.V1['0.32.0']['vllm.v1.worker.utils:NoSuchThing'] = '0' * 16",
    ],
    ids=["another function", "another source", "a missing piece"],
)
def test_unknown_code_is_left_alone(change: str, tmp_path: Path) -> None:
    python(
        f"""
        from stepgraph.interop import vllm as shim
        from stepgraph.interop.vllm import known
        import vllm.v1.worker.gpu_model_runner as module

        {change}
        before = dict(vars(module.GPUModelRunner))
        shim.register()
        assert "0.32.0" in shim.counters()["status"], shim.counters()
        assert dict(vars(module.GPUModelRunner)) == before
        """,
        tmp_path,
        STEPGRAPH_VLLM="on",
    )


def test_a_typing_error_in_the_variable_turns_it_off_and_says_so(tmp_path: Path) -> None:
    result = engine.run(
        checkpoint.cached("granite4-tiny"), joining_and_leaving()[:1], mode="onn", fresh=True
    )
    assert "off, on, verify, verify:N or record" in result.counters["status"]
    assert result.log.count("stepgraph is off") == 1


def test_two_engines_in_one_process(tmp_path: Path) -> None:
    """The second starts after machine code was loaded, which vLLM's scan of modules met."""
    out = python(
        f"""
        import gc
        from vllm import LLM, SamplingParams
        from stepgraph.interop.vllm import counters

        params = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False, ignore_eos=True)
        for i in range(2):
            llm = LLM(
                {str(checkpoint.cached("granite4-tiny"))!r},
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=512,
                max_num_seqs=4,
                dtype="float32",
                kv_cache_memory_bytes=64 << 20,
                enable_prefix_caching=True,
            )
            prompts = [{{"prompt_token_ids": [5 + k, 6, 7]}} for k in range(3)]
            out = llm.generate(prompts, params, use_tqdm=False)
            print("TOKENS", [o.outputs[0].token_ids for o in out])
            c = counters()
            assert c["compiled"] == 7 * (i + 1) and c["errors"] == c["mismatches"] == 0, c
            assert c["attached"] == i + 1
            del llm
            gc.collect()
        """,
        tmp_path,
        STEPGRAPH_VLLM="on",
    )
    first, second = (line for line in out.splitlines() if line.startswith("TOKENS"))
    assert first == second


def test_record_writes_steps_that_replay(tmp_path: Path) -> None:
    from stepgraph.recording import StepReader

    path = checkpoint.cached("granite4-tiny")
    requests = joining_and_leaving()
    off = engine.run(path, requests, prefix_caching=True)
    recorded = engine.run(
        path,
        requests,
        mode="record",
        prefix_caching=True,
        env={"STEPGRAPH_VLLM_DIR": str(tmp_path / "new folder")},
    )
    assert recorded.tokens == off.tokens and recorded.counters["compiled"] == 0
    (file,) = (tmp_path / "new folder").glob("*.sgs")
    reader = StepReader(file)
    steps = list(reader)
    assert len(steps) == len(off.builds) == recorded.counters["recorded"]
    assert [s.ints["num_reqs"] for s in steps] == [n for n, _, _ in off.builds]
    kinds = [(g["kind"], g["cache_mode"]) for g in reader.header["groups"]]
    assert kinds == [("recurrent", "align")] * 9 + [("attention", "none")]
    done = subprocess.run(
        [sys.executable, "-m", "stepgraph", "replay", str(file), "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = engine.json.loads(done.stdout)
    assert result["steps"] == len(steps) and result["mismatches"] == 0


def test_an_unwritable_folder_does_not_stop_serving(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    result = engine.run(
        checkpoint.cached("granite4-tiny"),
        joining_and_leaving()[:1],
        mode="record",
        env={"STEPGRAPH_VLLM_DIR": str(blocked)},
    )
    assert result.counters["recorded"] == 0 and result.counters["errors"] == 1
    assert len(result.tokens[0]) == 30


def test_a_recording_that_breaks_off_does_not_stop_serving(tmp_path: Path) -> None:
    result = engine.run(
        checkpoint.cached("granite4-tiny"),
        joining_and_leaving()[:1],
        mode="record",
        hook="hooks.py:close_the_recorder",
        env={"STEPGRAPH_VLLM_DIR": str(tmp_path)},
    )
    assert result.extra["calls"] == 8  # three failures, then it is not tried again
    assert result.counters["recorded"] == 5 and result.counters["errors"] == 3
    assert result.counters["native"]["disabled after errors"] > 10
    assert len(result.tokens[0]) == 30


def test_bench_gives_one_json_object(tmp_path: Path) -> None:
    options = ["--json", "--repeat", "1", "--batch", "3", "--tokens", "12"]
    model = str(checkpoint.cached("nemotronh"))
    done = subprocess.run(
        [sys.executable, "-m", "stepgraph", "bench", "vllm", *options, "--model", model],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**engine.os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    assert done.returncode == 0, done.stderr
    result = engine.json.loads(done.stdout)
    assert result["groups"] == 4 and result["tokens_equal"] and result["mismatches"] == 0
    assert result["ratio"] == pytest.approx(result["native_us"] / result["compiled_us"], abs=0.02)
    assert result["compiled_step_share"] >= 0.95
    assert result["steps_verified"] >= 11 and set(result["native_reasons"]) == {"prefill"}
