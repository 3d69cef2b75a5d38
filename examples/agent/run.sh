#!/usr/bin/env bash
# Trains a small language model under an agent, a coroutine with OpenAI's client, with DARO on this machine, from nothing:
#   bash examples/agent/run.sh [a.b=c ...]    for example trainer.steps=5
# Stages: virtual environment (unless one is active), packages, base model (kept for the next run), training with
# evaluation at both ends, table and report. The arguments a.b=c are passed to `megatron-daro train`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
name=agent minutes=6 minutes_sglang=15
export PYTHONPATH=$PWD/examples/agent${PYTHONPATH:+:$PYTHONPATH}

own_options() { :; }

make_base() {
    if ! "$bin/python" -c 'import openai' 2>/dev/null; then
        stage "package openai"
        "$bin/python" -m pip install -q --disable-pip-version-check "openai>=3,<4"
    fi
    stage "base model: runs/tool_use-base (about 70 s, unless it is there already)"
    "$bin/python" examples/tool_use/products.py
}

source examples/one_command.sh
one_command "$@"
