"""Only the package list: everything else is in pyproject.toml.

pipeline/, kernels/, interop/ and profiling/ are folders at the top of the tree that install under
the one name `stepgraph`. Setuptools' own discovery takes one root, so their subpackages are found
here, and a new subpackage cannot be forgotten.
"""

from setuptools import find_packages, setup

PARTS = ("pipeline", "kernels", "interop", "profiling")


def packages() -> list[str]:
    found = find_packages(include=["stepgraph", "stepgraph.*"])
    for part in PARTS:
        found.append(f"stepgraph.{part}")
        found.extend(f"stepgraph.{part}.{name}" for name in find_packages(part))
    return found


setup(
    packages=packages(),
    package_dir={"stepgraph": "stepgraph", **{f"stepgraph.{part}": part for part in PARTS}},
)
