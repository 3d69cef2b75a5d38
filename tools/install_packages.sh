#!/usr/bin/env bash
# Installs this checkout with what its tests need into the environment of an interpreter, unless that was done before
# with the same requirements, interpreter and checkout. The quickstart and tests/run.sh both call it:
#   bash tools/install_packages.sh PYTHON
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
prefix=$("$python" -c 'import sys; print(sys.prefix)')
stamp=$prefix/.megatron_daro_installed
wanted=$({ cat setup.py requirements.txt; echo "$PWD"; "$python" -VV; } | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "already installed in $prefix"
    exit
fi
echo "installing into $prefix (one to three minutes)"
"$python" -m pip install -q --disable-pip-version-check -e '.[dev]'
echo "$wanted" >"$stamp"
