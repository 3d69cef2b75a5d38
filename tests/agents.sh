#!/usr/bin/env bash
# The tests of agents with clients of others: openai, litellm, openai-agents, mini-swe-agent.
#
#   bash tests/agents.sh                     arguments go to pytest
#
# Those on SGLang servers need $MEGATRON_DARO_SGLANG, the environment of tools/sglang_cpu_env.sh.
# Makes a virtual environment in $MEGATRON_DARO_AGENTS, else .venv-agents, that sees the packages of the active one (else
# .venv) and adds the clients and what they lack, from PyPI. The last lines are pytest's; exit status: pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

clients="openai==3.57.0 litellm==1.110.2 openai-agents==0.24.0 mini-swe-agent==2.4.6"
base=${VIRTUAL_ENV:-$PWD/.venv}/bin/python
place=${MEGATRON_DARO_AGENTS:-$PWD/.venv-agents}
if [ "$(cat "$place/.made" 2>/dev/null)" != "$clients" ]; then
    "$("$base" -c 'import sys; print(sys._base_executable)')" -m venv --clear "$place"
    "$base" -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
        >"$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
    # shellcheck disable=SC2086
    "$place/bin/python" -m pip install -q --disable-pip-version-check $clients
    echo "$clients" >"$place/.made"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$place/bin/python" -m pytest -q "$@" tests/unit/environments/test_agent_clients.py tests/e2e/test_agent_runs.py \
    tests/sglang/test_sglang_agents.py
