"""Is the vLLM that is installed one whose code we know? The check is on the code itself: source
text without comments, docstrings and blank lines, so a version string alone proves nothing.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Mapping
from typing import Any


def of(thing: Any) -> str:
    """16 hex digits for the source text of a function or class.

    Raises OSError or TypeError where the source cannot be read.
    """
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))
    lines = text.splitlines()
    cut: list[tuple[int, int, int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            cut.append((*token.start, *token.end))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = node.body[0]
            doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if doc and isinstance(first.value.value, str):  # type: ignore[attr-defined]
                assert first.end_lineno is not None and first.end_col_offset is not None
                end = (first.end_lineno, first.end_col_offset)
                cut.append((first.lineno, first.col_offset, *end))
    for row, column, end_row, end_column in sorted(cut, reverse=True):
        head, tail = lines[row - 1][:column], lines[end_row - 1][end_column:]
        lines[row - 1 : end_row] = [head + tail]
    kept = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


def resolve(name: str) -> Any:
    """ "package.module:Class.method" as an object."""
    module, _, path = name.partition(":")
    thing: Any = importlib.import_module(module)
    for part in path.split("."):
        # Not getattr: an inherited method must not pass for the class's own.
        thing = vars(thing)[part]
    return thing


def differences(known: Mapping[str, str]) -> list[str]:
    """Names whose source is not the known one (or is gone, or cannot be read)."""
    wrong = []
    for name, digest in known.items():
        try:
            if of(resolve(name)) != digest:
                wrong.append(name)
        except (ImportError, AttributeError, KeyError, OSError, TypeError, SyntaxError):
            wrong.append(name)
    return wrong
