#!/usr/bin/env bash
# Runs the engine's tests with the oldest supported set, vLLM 0.23, torch 2.11 and transformers 5.17 on
# CPU, in .venv-oldest (made in minutes the first time):
#
#   scripts/oldest.sh [pytest's arguments]
#
# raypo[cpu] itself asks for a newer vLLM: on CPU 0.23 holds no LoRA adapters (it pins host memory, which
# needs a GPU), and ignores the seeds of a step that samples a greedy request too. Its Python is that of
# 0.23 on GPUs, which raypo[gpu] allows.
set -euo pipefail
cd "$(dirname "$0")/.."
RAYPO_DEVICE=oldest scripts/setup.sh
[ $# -gt 0 ] || set -- tests/unit/serving tests/integration/test_engine.py \
    tests/integration/test_engine_joins.py tests/integration/test_lean_scheduler.py \
    tests/integration/test_vllm_frozen.py \
    tests/integration/test_in_flight.py tests/integration/test_gpu_parts.py \
    tests/integration/test_gpu_engine.py
PYTHONPATH=$PWD .venv-oldest/bin/python -m pytest -m "unit or integration" "$@"
