#!/usr/bin/env bash
# Checks raypo against the GPU builds of some vLLM versions, on a machine without a GPU:
#
#   scripts/gpu_build.sh 0.32.0 0.33.0
#
# Each wheel (0.3 GB) is downloaded once, and its Python unpacked to .gpu_build/VERSION. The names and
# signatures that raypo uses are looked for in it, and it is given the arguments of engines on GPUs.
# 0.23 needs the dependencies of its time: PYTHON=.venv-oldest/bin/python scripts/gpu_build.sh 0.23.0
set -euo pipefail
cd "$(dirname "$0")/.."
for version in "${@:?versions of vLLM: scripts/gpu_build.sh 0.32.0}"; do
    folder=.gpu_build/$version
    if [ ! -d "$folder/vllm" ]; then
        .venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --dest "$folder.wheel" \
            --python-version 3.11 --platform manylinux_2_28_x86_64 "vllm==$version"
        .venv/bin/python - "$folder.wheel" "$folder" <<'PYTHON'
import sys
from pathlib import Path
from zipfile import ZipFile

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with ZipFile(wheel) as files:
    compiled = (".so", ".h", ".hpp", ".cuh", "vllm-rs")
    files.extractall(sys.argv[2], [name for name in files.namelist() if not name.endswith(compiled)])
PYTHON
        rm -r "$folder.wheel"
    fi
    RAYPO_VLLM=$PWD/$folder PYTHONPATH=$PWD ${PYTHON:-.venv/bin/python} -m pytest -m "unit or integration" \
        tests/unit/serving/test_vllm_sources.py tests/integration/test_gpu_engine.py
done
