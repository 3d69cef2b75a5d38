#!/usr/bin/env bash
# Makes the environments in which the adapters meet their hosts, and runs tests/plugins and the contracts there.
#
#   bash tests/host_environments.sh                every host that can be installed here
#   bash tests/host_environments.sh verl           one of them; further arguments go to pytest
#   bash tests/host_environments.sh verl --make    makes the environment and runs nothing
#
# verl 0.9.1 comes from PyPI, with torch 2.13.0 (without CUDA where that wheel is offered), into $MEGATRON_DARO_VERL_ENV,
# else .venv-verl (2.5 GB). slime, NeMo-RL, ROLL and Megatron-LM are no packages: give their checkouts as
# MEGATRON_DARO_SLIME, MEGATRON_DARO_NEMO_RL, MEGATRON_DARO_ROLL and MEGATRON_DARO_MEGATRON_LM, and the contracts and
# tests of tests/run.sh use them.
# The last line is pytest's; exit status: pytest's, or 1 where the environment could not be made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 RAY_DEDUP_LOGS=0

host=${1:-verl}
[ $# = 0 ] || shift
[ "$host" = verl ] || {
    echo "tests/host_environments.sh: got '$host'; allowed: verl" >&2
    exit 1
}
base=${VIRTUAL_ENV:-$PWD/.venv}/bin/python
place=${MEGATRON_DARO_VERL_ENV:-$PWD/.venv-verl}
wanted="verl 0.9.1, torch 2.13.0, megatron-core 0.16.1"

if [ "$(cat "$place/.made" 2>/dev/null)" != "$wanted" ]; then
    echo "making $place: $wanted (three to ten minutes)"
    "$("$base" -c 'import sys; print(sys._base_executable)')" -m venv --clear "$place"
    # What verl imports and does not require: uvicorn to opentelemetry by engine_workers, peft by the engines.
    "$place/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 verl==0.9.1 megatron-core==0.16.1 \
        peft uvicorn fastapi opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp 'TransferQueue>=0.1.10' \
        cachetools 'pytest>=9,<10' 'pytest-timeout>=2.4,<3' 'hypothesis>=6.170,<7'
    # This package without its requirements: it must work with those of the host.
    "$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' | {
        read -r site
        echo "$PWD" >"$site/megatron_daro.pth"
    }
    echo "$wanted" >"$place/.made"
fi
[ "${1:-}" != --make ] || exit 0
[ $# != 0 ] || set -- tests/plugins tests/contract/test_host_contracts.py
exec "$place/bin/python" -m pytest -q "$@"
