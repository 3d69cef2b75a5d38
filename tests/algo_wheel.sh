#!/usr/bin/env bash
# Builds the wheel megatron-daro-algo, checks it, and installs it in fresh environments of Python 3.10 and 3.12.
#
#   bash tests/algo_wheel.sh             what tests/run.sh --all does
#   bash tests/algo_wheel.sh --torch     also takes torch from PyPI there (with CUDA, 3 GB for each Python) and runs a loss
#
# Without --torch both environments import what needs no torch and compile everything; the loss is run from the installed
# wheel by the active Python, whose torch is used. A Python that is not there is named and left out.
# The wheel's requirements are torch, numpy, pydantic, PyYAML and typing-extensions. Publishing it is for a person.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

first=${VIRTUAL_ENV:-$PWD/.venv}/bin/python
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
# A copy: builds leave folders beside the sources.
mkdir "$place/source"
cp -r setup.py pyproject.toml requirements.txt README.md LICENSE docs megatron_daro "$place/source"
MEGATRON_DARO_DISTRIBUTION=algo "$first" -m pip wheel -q --disable-pip-version-check --no-deps -w "$place" "$place/source"
wheel=$(echo "$place"/megatron_daro_algo-*.whl)
"$first" -m venv "$place/twine"
"$place/twine/bin/python" -m pip install -q --disable-pip-version-check 'twine>=6,<7'
"$place/twine/bin/python" -m twine check --strict "$wheel"

cat >"$place/loss.py" <<'PYTHON'
import sys

import torch

import megatron_daro
from megatron_daro.plugins.core import DifficultyStep, SampleSums
from megatron_daro.plugins.options import read_options

assert megatron_daro.__file__.startswith(sys.argv[1]), megatron_daro.__file__
step = DifficultyStep(read_options("daro.learning_rate=0.02").algorithm(4))
bins, mask = torch.tensor([1, 1, 1, 1, 3, 3, 3, 3]), torch.ones(8, 5)
losses = torch.linspace(-1, 1, 40).reshape(8, 5).requires_grad_()
step.begin(bins, mask.sum(1), lambda vector: vector)
loss = step.weigh(SampleSums.of_rows(losses, mask), bins)
loss.backward()
assert torch.allclose(losses.grad, torch.full((8, 5), 1 / 20)), losses.grad
metrics = step.end(lambda vector: vector)
print("Python", sys.version.split()[0], "torch", torch.__version__, "loss", round(float(loss), 6), metrics["difficulty/tokens/1"])
PYTHON

for version in 3.10 3.12; do
    python=
    for candidate in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python; do
        "$candidate" -c '' 2>/dev/null && python=$candidate && break
    done
    [ -n "$python" ] || {
        echo "left out: no Python $version here"
        continue
    }
    "$python" -m venv "$place/$version"
    bin=$place/$version/bin/python
    "$bin" -m pip install -q --disable-pip-version-check --no-deps "$wheel"
    if [ "${1:-}" = --torch ]; then
        "$bin" -m pip install -q --disable-pip-version-check "$wheel"
        (cd "$place" && "$bin" -W ignore loss.py "$place/$version")
    else
        "$bin" -m pip install -q --disable-pip-version-check 'pydantic>=2.7' 'pyyaml>=6'
    fi
    site=$("$bin" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$bin" -m compileall -q -f "$site/megatron_daro"
    (cd "$place" && "$bin" -c 'import megatron_daro.config, megatron_daro.config.yaml_text, megatron_daro.errors')
    echo "Python $version: installed, compiled, imported"
done

# Nothing of this checkout, nor of the requirements of the other distribution, may be needed.
"$first" -m pip install -q --disable-pip-version-check --no-deps --target "$place/alone" "$wheel"
(cd "$place" && PYTHONPATH=$place/alone "$first" -W ignore loss.py "$place/alone")
(cd "$place" && PYTHONPATH=$place/alone "$first" -W ignore -c "
import importlib
for name in ('slime', 'miles', 'megatron_rl', 'nemo_rl', 'core'):
    assert importlib.import_module('megatron_daro.plugins.' + name).__file__.startswith('$place')")
echo "megatron-daro-algo: $(basename "$wheel") holds"
