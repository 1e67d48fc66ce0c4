"""The adapter for vLLM's V1 runner: `GPUModelRunner._build_attention_metadata` is wrapped, and what
the compiled step cannot do, or may not do, goes to vLLM's own code, with the reason counted.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

from . import mamba2
from .compare import differences
from .counters import COUNTERS
from .decode import DecodeStep
from .record import Recorder
from .settings import Settings
from .tolerant import make_llvmlite_scannable

log = logging.getLogger("vllm.stepgraph")

MODULE = "vllm.v1.worker.gpu_model_runner"
SIGNATURE = (
    "self num_tokens num_reqs max_query_len num_tokens_padded num_reqs_padded ubatch_slices "
    "logits_indices max_num_sampled_tokens use_spec_decode for_cudagraph_capture "
    "num_scheduled_tokens slot_mappings"
).split()
MAX_ERRORS = 3  # of ours; then the runner stays with vLLM's path
_ATTRIBUTE = "_stepgraph"


class Attachment:
    """What the shim knows of one runner. `reason`: why vLLM's path is used for all its steps."""

    def __init__(self, runner: Any, settings: Settings) -> None:
        self.runner = weakref.proxy(runner)  # which holds us: no cycle, so that it is freed at once
        self.settings = settings
        self.step: DecodeStep | None = None
        self.recorder: Recorder | None = None
        self.errors = 0
        self.distrusted = False
        self.reason: str | None = None
        if settings.mode == "record":
            self.reason = "recording"
            self.recorder = Recorder(self.runner, settings.directory)
            log.info("stepgraph: recording steps to %s", self.recorder.path)
        else:
            self.bind()

    def bind(self) -> None:
        """Compile (or find) the decode step and bind it to the runner's tensors."""
        self.step = None
        self.reason, builders = supported(self.runner)
        if self.reason is not None:
            log.info("stepgraph: vLLM's own metadata path is used: %s", self.reason)
            return
        start = time.perf_counter()
        try:
            self.step = DecodeStep(self.runner, builders)
        finally:
            make_llvmlite_scannable()
        seconds = time.perf_counter() - start
        COUNTERS.attached += 1
        COUNTERS.compile_seconds += seconds
        log.info(
            "stepgraph: decode steps of %d of %d KV-cache groups are compiled (%.2f s, mode %s)",
            len(builders),
            len(self.runner.kv_cache_config.kv_cache_groups),
            seconds,
            self.settings.mode,
        )

    def build(
        self, num_reqs: int, slot_mappings: dict[int, Any], native: Callable[[], Any]
    ) -> tuple[str | None, Any]:
        """(None, metadata) of a decode-only step; (reason, None) if vLLM has to build it."""
        if self.step is not None and not self.step.is_current():
            log.info("stepgraph: the runner's tensors changed; binding again")
            self.bind()
        if self.step is None:
            return self.reason or "not bound", None
        verifying = self.settings.mode == "verify"
        if self.distrusted and not verifying:
            return "disabled after a mismatch", None
        shape = self.step.shape(num_reqs)
        ours = self.step.build(shape, num_reqs, slot_mappings)
        if ours is None:
            return "prefill", None
        due = verifying and (COUNTERS.compiled + COUNTERS.mismatches) % self.settings.every == 0
        if shape.trusted and not due and not self.distrusted:
            COUNTERS.compiled += 1
            return None, (ours, None)
        theirs = _Native.run(native)
        found = differences(theirs[0], ours)
        COUNTERS.verified += 1
        if found:
            self._mismatch(found, num_reqs)
            return None, theirs
        shape.trusted = True
        if self.distrusted:
            COUNTERS.native["disabled after a mismatch"] += 1
            return None, theirs
        COUNTERS.compiled += 1
        return None, (ours, None)

    def _mismatch(self, found: list[str], num_reqs: int) -> None:
        COUNTERS.mismatches += 1
        COUNTERS.native["mismatch"] += 1
        if self.distrusted:
            return
        self.distrusted = True
        where = "the step could not be recorded"
        try:
            recorder = Recorder(self.runner, self.settings.directory, "mismatch")
            recorder.write(num_reqs, num_reqs)
            recorder.close()
            where = f"the step is in {recorder.path}"
        except Exception as err:
            where = f"{where}: {err}"
        log.error(
            "stepgraph: the compiled metadata differs from vLLM's; vLLM's is used from here on. "
            "%s. %s",
            "; ".join(found),
            where,
        )

    def failed(self, err: BaseException) -> None:
        """An exception of ours: said once, counted, and after a few the shim stays out."""
        COUNTERS.errors += 1
        self.errors += 1
        if self.errors == 1:
            log.warning("stepgraph failed; vLLM's own path goes on", exc_info=err)
        if self.errors >= MAX_ERRORS:
            self.step = self.recorder = None
            self.reason = "disabled after errors"


class _Native(Exception):
    """Carries an exception of vLLM's own code past our handler for our own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error

    @staticmethod
    def run(native: Callable[[], Any]) -> Any:
        try:
            return native()
        except Exception as err:
            raise _Native(err) from err


def supported(runner: Any) -> tuple[str | None, dict[int, Any]]:
    """(why this runner is left to vLLM or None, {index of a KV-cache group: builder} to
    compile)."""
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import (
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        MambaSpec,
        UniformTypeKVCacheSpecs,
    )

    config = runner.vllm_config
    for reason, applies in (
        (f"device {runner.device.type}", runner.device.type != "cpu"),
        ("speculative decoding", runner.speculative_config is not None),
        ("decode context parallelism", runner.dcp_world_size > 1),
        ("prefix-LM masks", runner.is_mm_prefix_lm),
        ("reference sliding window", runner.model_config.rswa_window is not None),
        ("ReplaySSM", runner.cache_config.use_replayssm),
        ("KV-sharing fast prefill", runner.cache_config.kv_sharing_fast_prefill),
        ("ubatching", config.parallel_config.use_ubatching),
    ):
        if applies:
            return reason, {}
    builders: dict[int, Any] = {}
    why = "no group of a compiled family"
    for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(
            spec, (CrossAttentionSpec, EncoderOnlyAttentionSpec, UniformTypeKVCacheSpecs)
        ):
            return type(spec).__name__, {}
        groups = runner.attn_groups[gid]
        found = [g.get_metadata_builder(0) for g in groups]
        if len(found) != 1 or type(found[0]) is not Mamba2AttentionMetadataBuilder:
            continue  # vLLM's builder makes it
        refusal = mamba2.unsupported(found[0])
        if type(spec) is not MambaSpec or groups[0].kernel_block_size is not None:
            refusal = f"Mamba2 with {type(spec).__name__}"
        if refusal is None:
            builders[gid] = found[0]
        else:
            why = refusal
    return (None, builders) if builders else (why, {})


def step_reason(
    num_tokens: int,
    num_reqs: int,
    max_query_len: int,
    num_tokens_padded: int | None,
    num_reqs_padded: int | None,
    ubatch_slices: Any,
    use_spec_decode: bool,
    for_cudagraph_capture: bool,
    slot_mappings: Any,
) -> str | None:
    """Why this step is vLLM's, from the call's arguments alone."""
    if max_query_len != 1 or num_tokens != num_reqs:
        return "prefill"
    if for_cudagraph_capture:
        return "graph capture"
    if ubatch_slices is not None:
        return "ubatching"
    if use_spec_decode:
        return "speculative decoding"
    if (num_reqs_padded or num_reqs) != num_reqs or (num_tokens_padded or num_tokens) != num_tokens:
        return "padded batch"
    if slot_mappings is None:
        return "no slot mappings"
    return None


def install(module: Any, settings: Settings) -> Callable[[], bool]:
    """Wrap the runner class of `module` (vLLM's gpu_model_runner); returns the undo function.

    Raises RuntimeError if the class is not as known.
    """
    cls = module.GPUModelRunner
    native_build, native_init = cls._build_attention_metadata, cls.initialize_kv_cache
    if list(inspect.signature(native_build).parameters) != SIGNATURE:
        raise RuntimeError("_build_attention_metadata has other parameters")

    @functools.wraps(native_build)
    def _build_attention_metadata(
        self: Any,
        num_tokens: int,
        num_reqs: int,
        max_query_len: int,
        num_tokens_padded: int | None = None,
        num_reqs_padded: int | None = None,
        ubatch_slices: Any = None,
        logits_indices: Any = None,
        max_num_sampled_tokens: int | None = None,
        use_spec_decode: bool = False,
        for_cudagraph_capture: bool = False,
        num_scheduled_tokens: dict[str, int] | None = None,
        slot_mappings: dict[int, Any] | None = None,
    ) -> Any:
        def native() -> Any:
            return native_build(
                self,
                num_tokens,
                num_reqs,
                max_query_len,
                num_tokens_padded,
                num_reqs_padded,
                ubatch_slices,
                logits_indices,
                max_num_sampled_tokens,
                use_spec_decode,
                for_cudagraph_capture,
                num_scheduled_tokens,
                slot_mappings,
            )

        attached = self.__dict__.get(_ATTRIBUTE)
        if attached is None:
            COUNTERS.native["not bound"] += 1
            return native()
        try:
            reason = step_reason(
                num_tokens,
                num_reqs,
                max_query_len,
                num_tokens_padded,
                num_reqs_padded,
                ubatch_slices,
                use_spec_decode,
                for_cudagraph_capture,
                slot_mappings,
            )
            if attached.recorder is not None:
                if not for_cudagraph_capture:
                    attached.recorder.write(num_reqs, num_tokens)
                    COUNTERS.recorded += 1
            elif reason is None:
                assert slot_mappings is not None
                reason, result = attached.build(num_reqs, slot_mappings, native)
                if reason is None:
                    return result
            reason = attached.reason if reason is None else reason
        except _Native as carried:
            raise carried.error from None
        except Exception as err:
            reason = "error"
            attached.failed(err)
        COUNTERS.native[reason or "not bound"] += 1
        return native()

    @functools.wraps(native_init)
    def initialize_kv_cache(
        self: Any, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        self.__dict__.pop(_ATTRIBUTE, None)
        result = native_init(self, kv_cache_config, is_profiling, *args, **kwargs)
        if not is_profiling:
            try:
                self.__dict__[_ATTRIBUTE] = Attachment(self, settings)
            except Exception as err:
                COUNTERS.errors += 1
                log.warning("stepgraph could not attach; vLLM's own path is used", exc_info=err)
        return result

    ours = {
        "_build_attention_metadata": (_build_attention_metadata, native_build),
        "initialize_kv_cache": (initialize_kv_cache, native_init),
    }
    for name, (wrapper, _) in ours.items():
        setattr(cls, name, wrapper)

    def undo() -> bool:
        """Restore the class; False if somebody wrapped it after us (then nothing is changed)."""
        if any(cls.__dict__.get(name) is not wrapper for name, (wrapper, _) in ours.items()):
            return False
        for name, (_, original) in ours.items():
            setattr(cls, name, original)
        return True

    return undo
