"""stepgraph in vLLM: a plugin (entry point `vllm.general_plugins`), off unless asked for.

    STEPGRAPH_VLLM=on          compiled metadata for the steps it knows, vLLM's own for the rest
    STEPGRAPH_VLLM=verify      both, compared field by field on each such step (verify:N: each N-th)
    STEPGRAPH_VLLM=record      vLLM's own; every step's inputs are written to a step file
    STEPGRAPH_VLLM_DIR=folder  where step files go (default: the current folder)

Whatever it does not know (another vLLM, another builder, an option, a kind of step) and any
exception of its own leaves the step to vLLM, counted by reason: see `counters()`.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

from .counters import COUNTERS
from .settings import Settings, from_environment

log = logging.getLogger("vllm.stepgraph")
_undo: Callable[[], bool] | None = None
_finder: _AfterImport | None = None


def counters() -> dict[str, Any]:
    """What the shim did in this process; see `counters.Counters`."""
    return COUNTERS.to_dict()


def register() -> None:
    """vLLM's plugin hook, called once in each of its processes. Never raises."""
    try:
        settings = from_environment()
        if settings.mode != "off":
            install(settings)
    except Exception as err:
        COUNTERS.status = str(err)
        log.warning("stepgraph is off: %s", err)


def install(settings: Settings) -> None:
    """Wrap vLLM's V1 runner now, or as soon as its module is imported."""
    global _finder
    if COUNTERS.status in ("installed", "waiting for vLLM"):
        return
    from . import v1

    def patch(module: Any) -> None:
        global _undo
        try:
            if (reason := _unknown()) is not None:
                COUNTERS.status = reason
                log.warning("stepgraph is off: %s", reason)
                return
            _undo = v1.install(module, settings)
            COUNTERS.status = "installed"
            atexit.register(_say_counters)
        except Exception as err:
            COUNTERS.status = str(err)
            log.warning("stepgraph is off: %s", err)

    if v1.MODULE in sys.modules:
        patch(sys.modules[v1.MODULE])
        return
    # Importing the runner here would slow processes that never need it.
    COUNTERS.status = "waiting for vLLM"
    _finder = _AfterImport(v1.MODULE, patch)
    sys.meta_path.insert(0, _finder)


def uninstall() -> bool:
    """Restore every wrapped attribute. False if another plugin wrapped them after us: then nothing
    is changed."""
    global _undo, _finder
    if _finder is not None and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _finder = None
    if _undo is not None and not _undo():
        return False
    _undo = None
    COUNTERS.status = "off"
    return True


def _unknown() -> str | None:
    """Why the installed vLLM is not one whose code we know."""
    from . import fingerprint, known

    wrong: list[str] = []
    for table in known.V1.values():
        wrong = fingerprint.differences(table)
        if not wrong:
            return None
    return (
        f"this vLLM is not one of {', '.join(known.V1)}: "
        f"{wrong[0].partition(':')[2]} and {len(wrong) - 1} more differ"
        if len(wrong) > 1
        else f"this vLLM is not one of {', '.join(known.V1)}: {wrong[0].partition(':')[2]} differs"
    )


def _say_counters() -> None:
    c = COUNTERS
    native = ", ".join(f"{reason} {n}" for reason, n in c.native.most_common()) or "none"
    log.info(
        "stepgraph: %d steps compiled, native: %s; %d compared, %d mismatches, %d errors",
        c.compiled,
        native,
        c.verified,
        c.mismatches,
        c.errors,
    )


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `then(module)` right after the module `name` is imported, once."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self.then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


__all__ = ["counters", "install", "register", "uninstall"]
