"""Fingerprints of source: comments, docstrings and blank lines do not count, everything else
does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stepgraph.interop.vllm import fingerprint

BASE = '''
class Runner:
    """A class."""

    def build(self, n: int = 1) -> int:
        """Says what it does."""
        total = 0  # a comment
        for i in range(n):
            total += i

            if i == "a # b":
                total -= 1
        return total
'''


def module(text: str, folder: Path, name: str) -> ModuleType:
    (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def digest(text: str, folder: Path, name: str) -> str:
    return fingerprint.of(module(text, folder, name).Runner.build)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("  # a comment", "", True),
        ('"""Says what it does."""', '"""Says it\n        otherwise."""', True),
        ("\n\n            if", "\n            if", True),
        ("        total = 0", "        # more\n        total = 0", True),
        ("n: int = 1", "n: int = 2", False),
        ("total += i", "total += 2 * i", False),
        ('"a # b"', '"a # c"', False),
        ("        return total", "            return total", False),
    ],
)
def test_what_counts(old: str, new: str, same: bool, tmp_path: Path) -> None:
    number = abs(hash((old, new)))
    assert old in BASE
    first = digest(BASE, tmp_path, f"first_{number}")
    second = digest(BASE.replace(old, new), tmp_path, f"second_{number}")
    assert (first == second) is same


def test_differences_name_what_changed_or_is_gone(tmp_path: Path) -> None:
    found = module(BASE, tmp_path, "fingerprinted")
    right = fingerprint.of(found.Runner.build)
    known = {
        "fingerprinted:Runner.build": right,
        "fingerprinted:Runner.gone": right,
        "fingerprinted:Runner": right,
        "no_such_module:Runner": right,
        "builtins:len": right,
    }
    assert fingerprint.differences(known) == list(known)[1:]


def test_an_inherited_method_is_not_the_classs_own(tmp_path: Path) -> None:
    found = module(BASE + "\nclass Child(Runner):\n    pass\n", tmp_path, "inheriting")
    right = fingerprint.of(found.Runner.build)
    assert fingerprint.differences({"inheriting:Child.build": right}) == ["inheriting:Child.build"]
