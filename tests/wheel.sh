#!/usr/bin/env bash
# Builds the wheel and trains two steps of the quickstart from it alone, as one who has no checkout.
#
#   bash tests/wheel.sh             what tests/run.sh --all does
#
# A fresh environment has the wheel; the packages that it asks for are those of the active one, else .venv. The run is
# outside of this checkout. The quickstart's base model is made in runs/quickstart-base, unless it is there already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

first=${VIRTUAL_ENV:-$PWD/.venv}/bin/python
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH VIRTUAL_ENV
"$first" examples/quickstart/build_base.py
mkdir "$place/source" "$place/runs"
# A copy: builds leave folders beside the sources.
cp -r setup.py pyproject.toml requirements.txt README.md LICENSE megatron_daro "$place/source"
cp -r runs/quickstart-base "$place/runs"
cp examples/quickstart/config.yaml "$place"

"$first" -m pip wheel -q --disable-pip-version-check --no-deps -w "$place" "$place/source"
rm -r "$place/source"
"$first" -m venv --without-pip "$place/fresh"
"$first" -m pip --python "$place/fresh/bin/python" install -q --disable-pip-version-check --no-deps "$place"/*.whl
# Plain paths, so .pth files in those folders do not count: this checkout, installed in place, is none of them.
"$first" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("site-packages")))' \
    >"$("$place/fresh/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"

cd "$place"
fresh/bin/python -c "
import megatron_daro
assert megatron_daro.__file__.startswith('$place'), megatron_daro.__file__"
fresh/bin/megatron-daro train config.yaml trainer.steps=2 trainer.eval_every_steps=0 </dev/null
fresh/bin/megatron-daro report runs/quickstart
