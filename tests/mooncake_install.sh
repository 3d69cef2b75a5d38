#!/usr/bin/env bash
# Installs what tests of weights over Mooncake's transfer engine need: bash tests/mooncake_install.sh PYTHON...
# Its package without CUDA for each of these interpreters (46 MB), and Debian's libibverbs and libnuma. Without root, or on
# another system, it says so and ends well: the tests then skip with the same reason. Says how long it took.
set -euo pipefail
imports() { "$1" -c 'import mooncake.engine' 2>/dev/null; }
SECONDS=0
for python in "$@"; do
    if ! imports "$python" && ! "$python" -m pip install -q --disable-pip-version-check --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1; then
        echo "mooncake: its package could not be installed; its tests will be skipped"
        exit 0
    fi
done
if ! imports "$1"; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "mooncake: libibverbs is missing, which needs root and apt-get; its tests will be skipped"
        exit 0
    fi
    apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
        libibverbs1 libnuma1 >/dev/null || {
        echo "mooncake: libibverbs could not be installed; its tests will be skipped"
        exit 0
    }
fi
for python in "$@"; do imports "$python" || "$python" -c 'import mooncake.engine'; done
echo "mooncake: installed in $SECONDS s"
