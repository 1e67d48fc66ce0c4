"""From generated text to a native function: compiled by Numba once, then kept as machine code in
the user's cache directory, so that a second process starts without Numba.

A cached object is used only if its key (text, kernels' text, compiler versions, processor) and its
checksum agree; anything else is compiled anew. Nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from stepgraph.pipeline.errors import CompileError

from .source import Source

log = logging.getLogger("stepgraph")
ENTRY = "stepgraph_step"
MAGIC = b"stepgraph object 1\n"
IN_PROCESS = 64  # distinct step functions kept; more than any server has
_EXTERNAL = frozenset({"memset", "memcpy", "memmove"})
_lock = threading.RLock()
_loaded: OrderedDict[str, Native] = OrderedDict()


@dataclass(frozen=True)
class Native:
    """A native step function. `call(context address)`; `origin`: compiled, disk or process."""

    call: Callable[[int], None]
    key: str
    engine: Any
    origin: str
    seconds: float


def cache_directory() -> Path | None:
    """Where machine code is kept: STEPGRAPH_CACHE_DIR (empty: nowhere), else the user's cache."""
    chosen = os.environ.get("STEPGRAPH_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "stepgraph"
    except RuntimeError:  # no home directory
        return None


def load(source: Source) -> Native:
    """The native function of `source`: from this process, from disk, or compiled now."""
    start = time.perf_counter()
    with _lock:
        key = _key(source)
        known = _loaded.get(key)
        if known is not None:
            _loaded.move_to_end(key)
            return Native(known.call, key, known.engine, "process", time.perf_counter() - start)
        directory = cache_directory()
        code = _read(directory, key) if directory is not None else None
        origin = "disk"
        call: Any = None
        if code is not None:
            try:
                call, engine = _link(code)
            except Exception as err:  # a foreign or damaged object: compile instead
                log.debug("stepgraph: cached object %s was not usable: %s", key, err)
                call = None
        if call is None:
            origin = "compiled"
            code = _compile(source)
            call, engine = _link(code)
            if directory is not None:
                _write(directory, key, code, source.text)
        native = Native(call, key, engine, origin, time.perf_counter() - start)
        _loaded[key] = native
        while len(_loaded) > IN_PROCESS:
            _loaded.popitem(last=False)
        return native


def _key(source: Source) -> str:
    import llvmlite.binding as llvm

    digest = hashlib.sha256(MAGIC + source.text.encode())
    for name, where in sorted(source.kernels.items()):
        digest.update(f"{name}={where}".encode() + _module_text(where.split(":")[0]))
    digest.update(_module_text(__package__ + ".memory"))
    for package in ("numba", "llvmlite"):
        digest.update(f"{package} {metadata.version(package)}".encode())
    digest.update(llvm.get_host_cpu_name().encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode())
    return digest.hexdigest()[:40]


def _module_text(module: str) -> bytes:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise CompileError(f"kernel module {module!r} was not found")
    return Path(spec.origin).read_bytes()


def _compile(source: Source) -> bytes:
    """Machine code of the text, by Numba: a relocatable object with one entry."""
    import llvmlite.binding as llvm
    from numba import cfunc, njit

    from . import memory

    scope: dict[str, Any] = {k: v for k, v in vars(memory).items() if not k.startswith("__")}
    for name, where in source.kernels.items():
        module, _, function = where.partition(":")
        kernel = getattr(importlib.import_module(module), function)
        scope[name] = kernel if hasattr(kernel, "py_func") else njit(error_model="numpy")(kernel)
    exec(compile(source.text, "<stepgraph step>", "exec"), scope)
    try:
        compiled = cfunc("void(int64)", error_model="numpy")(scope["step"])
    except Exception as err:
        raise CompileError(f"Numba refused the generated step function: {err}") from err
    inner = compiled.native_name.removeprefix("cfunc.")
    module = llvm.parse_assembly(_with_entry(compiled.inspect_llvm(), inner))
    for function in module.functions:
        if not function.is_declaration and function.name != ENTRY:
            function.linkage = llvm.Linkage.internal
    machine = _machine()
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes.run(module, llvm.create_pass_builder(machine, options))
    needs = {f.name for f in module.functions if f.is_declaration}
    unknown = {n for n in needs if not n.startswith("llvm.")} - _EXTERNAL
    if unknown:
        raise CompileError(f"the generated step function calls {sorted(unknown)}")
    return bytes(machine.emit_object(module))


def _with_entry(text: str, inner: str) -> str:
    """The module with a plain `void ENTRY(i64)` around Numba's function (which returns a status and
    takes two result pointers; the step raises nothing)."""
    define = re.search(rf"^define [^@]*@\"?{re.escape(inner)}\"?\(", text, re.MULTILINE)
    if define is None:
        raise CompileError("Numba's module lacks the step function")
    opaque = " ptr " in " " + text[define.start() : text.index("\n", define.start())].replace(
        "(", " "
    )
    first, second = ("ptr", "ptr") if opaque else ("i8**", "{ i8*, i32, i8*, i8*, i32 }**")
    null = ("i8*", "{ i8*, i32, i8*, i8*, i32 }*") if not opaque else ("ptr", "ptr")
    return text + (
        f"\ndefine void @{ENTRY}(i64 %ctx) {{\n"
        f"  %result = alloca {null[0]}\n  %error = alloca {null[1]}\n"
        f'  %status = call i32 @"{inner}"({first} %result, {second} %error, i64 %ctx)\n'
        "  ret void\n}\n"
    )


def _machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="small",
    )


def _link(code: bytes) -> tuple[Callable[[int], None], Any]:
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(ENTRY)
    if not address:
        raise CompileError("the object has no step function")
    return ctypes.PYFUNCTYPE(None, ctypes.c_int64)(address), engine


def _read(directory: Path, key: str) -> bytes | None:
    try:
        data = (directory / f"{key}.sgo").read_bytes()
    except OSError:
        return None
    head, newline, code = data.removeprefix(MAGIC).partition(b"\n")
    if not data.startswith(MAGIC) or not newline:
        return None
    try:
        header = json.loads(head)
    except ValueError:
        return None
    want = {"key": key, "sha256": hashlib.sha256(code).hexdigest()}
    return code if header == want else None


def _write(directory: Path, key: str, code: bytes, text: str) -> None:
    header = json.dumps({"key": key, "sha256": hashlib.sha256(code).hexdigest()}).encode()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for suffix, data in (("py", text.encode()), ("sgo", MAGIC + header + b"\n" + code)):
            beside = directory / f".{key}.{suffix}.{os.getpid()}.{threading.get_ident()}"
            beside.write_bytes(data)
            os.replace(beside, directory / f"{key}.{suffix}")
    except OSError as err:
        log.debug("stepgraph: the step function was not cached: %s", err)
