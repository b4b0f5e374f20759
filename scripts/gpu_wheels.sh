#!/usr/bin/env bash
# Wheels for a GPU machine without a network, in pieces that are small enough to carry one by one:
#
#   scripts/gpu_wheels.sh .gpu_wheels        half a GB, in pieces of 60 MiB: .gpu_wheels/piece_00 ...
#
# There, on an image with Python 3.12 and torch 2.11, bring each piece and append it in order:
#
#   cat .gpu_wheels/piece_* >>/root/wheels.tar
#
# and after the last one:
#
#   tar -xf /root/wheels.tar -C /root && pip install --no-deps --no-index /root/wheels/*.whl
#   pip install --no-deps --no-build-isolation -e .
set -euo pipefail
out=$(realpath "${1:?where the pieces go: scripts/gpu_wheels.sh FOLDER}")
cd "$(dirname "$0")/.."
python=.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/wheels"

$python -m pip download --quiet --no-deps --dest "$work/wheels" --requirement scripts/gpu-offline.txt \
    --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_35_x86_64
# DeepSpeed has no wheel. It is pure Python and compiles what it needs where it runs.
DS_BUILD_OPS=0 $python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/wheels" \
    "$(grep '^deepspeed==' constraints-gpu.txt)"
tar -cf - -C "$work" wheels | split --bytes=60M --numeric-suffixes - "$out/piece_"
ls -l "$out"
