#!/usr/bin/env bash
# Makes a virtual environment in which SGLang serves on a machine without GPU:
#   bash tools/sglang_cpu_env.sh [--force] [DIR]      DIR: .venv-sglang in the project, unless given
# Afterwards `DIR/bin/python -m sglang.launch_server --device cpu ...` needs nothing in its environment (its arguments:
# examples/quickstart/sglang.yaml). Exact versions: tools/sglang_cpu/. Done once; a second call only looks. A machine
# with a GPU does not need it: there `pip install sglang` serves. --force makes it all the same.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
files=$project/tools/sglang_cpu
# Each of these would change what is installed, or leave it without byte code, which slows every start of a server.
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE PIP_TARGET PIP_PREFIX PIP_USER

# stage TEXT: one line before each stage, with the seconds since the start.
stage() { printf '[%3d s] %s\n' "$SECONDS" "$1"; }

# fail TEXT: one line on stderr; the end.
fail() {
    echo "sglang_cpu_env.sh: $1" >&2
    exit 1
}

# Sets `dir` and `force`.
read_arguments() {
    local argument
    dir='' force=''
    for argument in "$@"; do
        case "$argument" in
            -h | --help)
                sed -n '2,6s/^# //p' "$project/tools/sglang_cpu_env.sh"
                exit 0
                ;;
            --force) force=yes ;;
            '' | -*)
                echo "sglang_cpu_env.sh: got '$argument'; allowed: --force, and one directory" >&2
                exit 2
                ;;
            *)
                if [ -n "$dir" ]; then
                    echo "sglang_cpu_env.sh: got two directories, '$dir' and '$argument'; give one" >&2
                    exit 2
                fi
                dir=$argument
                ;;
        esac
    done
    dir=${dir:-$project/.venv-sglang}
    dir=${dir%/}
    case "$dir" in /*) ;; *) dir=$PWD/$dir ;; esac
}

refuse_gpu() {
    if [ -z "$force" ] && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        fail "not needed: this machine has a GPU, where 'pip install sglang' serves; --force makes the CPU environment"
    fi
}

find_python() {
    local candidate
    for candidate in python3.11 python3 python; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with venv was found (tried python3.11, python3, python); install one"
}

# What the environment was made of and for; another text means another environment.
fingerprint() {
    {
        (cd "$files" && find . -type f -not -path '*__pycache__*' | LC_ALL=C sort | while read -r name; do
            echo "$name"
            cat "$name"
        done)
        echo "$dir"
        "$1" -VV
    } | cksum
}

# The mark tells this script's folders, finished or not, from everybody else's.
make_environment() {
    if [ -e "$dir" ] && ! [ -e "$mark" ] && [ -n "$(ls -A "$dir" 2>/dev/null || echo file)" ]; then
        fail "$dir is there and was not made by this script; name another directory, or remove it"
    fi
    rm -rf -- "$dir"
    mkdir -p -- "$dir"
    : >"$mark"
    stage "environment: $dir with $("$base" -V)"
    "$base" -m venv "$dir" || fail "$base could not make a virtual environment in $dir (its words are above)"
}

# install TEXT PYTHON ARGUMENTS...: one call of pip, into the environment of that interpreter.
install() {
    stage "packages: $1"
    local python=$2
    shift 2
    "$dir/bin/python" -m pip --python "$python" install -qq --disable-pip-version-check "$@" ||
        fail "pip could not install everything (its words are above); mend that and run this again: it starts anew"
}

copy_stand_ins() {
    local site
    stage "stand-ins: operators of torchvision, sgl_kernel, settings"
    site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp -R "$files/stand_ins/." "$site/"
    rm -rf -- "$site"/sgl_kernel/__pycache__
}

# import_and_show PYTHON MODULE PACKAGE...: imports the module, then prints the versions of the packages.
import_and_show() {
    "$1" -P -c '
import importlib, sys
from importlib.metadata import version
importlib.import_module(sys.argv[1])
print("        " + ", ".join(f"{name} {version(name)}" for name in sys.argv[2:]))' "${@:2}" ||
        fail "$2 cannot be imported (the reason is above); the versions that were tested: $files"
}

read_arguments "$@"
refuse_gpu
base=$(find_python)
mark=$dir/.sglang_cpu_env
wanted=$(fingerprint "$base")
if [ -x "$dir/bin/python" ] && [ "$(cat "$mark" 2>/dev/null)" = "$wanted" ]; then
    stage "SGLang for CPU: $dir, installed already"
    exit 0
fi
make_environment
server=$dir/bin/python
install "torch, transformers and what SGLang imports" "$server" -r "$files/requirements.txt"
install "sglang, torchvision, xgrammar" "$server" --no-deps -r "$files/requirements-no-deps.txt"
copy_stand_ins
stage "check: importing the server"
import_and_show "$server" sglang.launch_server sglang torch transformers
echo "$wanted" >"$mark"
stage "SGLang for CPU: $dir, $(du -sh -- "$dir" | cut -f1)"
