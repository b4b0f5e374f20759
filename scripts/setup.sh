#!/usr/bin/env bash
# Makes .venv with raypo in it (editable) and the pinned set; a second call is instant.
#   PYTHON=python3.12    the interpreter; otherwise the first of python3.11 .. python3.13, python3
#   RAYPO_DEVICE=cpu     cpu | gpu; otherwise gpu where nvidia-smi finds one
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "raypo set-up: $*" >&2
    exit 2
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "no Python 3.11 or newer was found (tried ${PYTHON:-python3.11 python3.12 python3.13 python3})." \
        "Install one, or name it: make setup PYTHON=/path/to/python3.11"
}

find_device() {
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo gpu; else echo cpu; fi
}

# pip's find-links setting (a folder of wheels) in uv's notation; uv does not read pip's settings.
find_links() {
    local links=${PIP_FIND_LINKS:-}
    if [ -z "$links" ]; then
        links=$(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true)
    fi
    echo "$links" | xargs | tr ' ' ','
}

python=$(find_python)
device=${RAYPO_DEVICE:-$(find_device)}
case $device in
    cpu) constraints=constraints.txt options=(--override scripts/overrides-cpu.txt) ;;
    gpu) constraints=constraints-gpu.txt options=() ;;
    *) fail "RAYPO_DEVICE ($device) must be cpu or gpu." ;;
esac

stamp=.venv/raypo-setup
wanted="$device $python $(cat pyproject.toml "$constraints" scripts/overrides-cpu.txt scripts/setup.sh | cksum)"
if [ "$(cat $stamp 2>/dev/null)" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then
    exit 0
fi

command -v g++ >/dev/null ||
    fail "g++ was not found; DeepSpeed compiles its CPU communication with it." \
        "Install it (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module. Install it (Debian, Ubuntu: apt-get install python3-venv)."
"$python" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
    fail "$python has no header files (Python.h); DeepSpeed compiles against them." \
        "Install them (Debian, Ubuntu: apt-get install python3-dev)."

echo "raypo set-up: $device packages into .venv with $python"
if [ "$(.venv/bin/python -c 'import sys; print(sys.base_prefix)' 2>/dev/null)" != \
    "$("$python" -c 'import sys; print(sys.base_prefix)')" ]; then
    "$python" -m venv --clear .venv
fi
rm -f $stamp
.venv/bin/python -m pip install --quiet --constraint "$constraints" uv

export SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-}}
[ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
if [ "$device" = cpu ]; then
    links=$(find_links)
    if [ -n "$links" ]; then
        export UV_FIND_LINKS=${UV_FIND_LINKS:-$links}
    else
        options+=(--torch-backend cpu)
    fi
fi
.venv/bin/uv pip install --python .venv/bin/python --constraint "$constraints" \
    ${options[@]+"${options[@]}"} --editable ".[$device,dev]"
echo "$wanted" >$stamp
