#!/usr/bin/env bash
# The tests of Megatron's own parts once more, against another Megatron-core than the installed one.
#
#   bash tests/second_megatron.sh                   tests/parallel, and the tests of how options are read
#   bash tests/second_megatron.sh tests/parallel/test_checkpoints.py -k torn       arguments go to pytest
#
# The other version is 0.19.2, or 0.16.1 where a newer one is installed. It is fetched from PyPI (with triton, which 0.18
# and later import: 290 MB, 1 GB on disk) and unpacked into $MEGATRON_DARO_SECOND, else .venv-second-megatron: an
# environment that sees everything of the installed one and this Megatron-core first. Its wheel asks for Python 3.12 and
# runs with 3.11 too. Uses the virtual environment that is active, else .venv (tests/run.sh makes it).
# Checkpoints are also exchanged between the two versions (tests/parallel/test_other_megatron.py).
# The last line is pytest's; exit status: pytest's, or 1 where the environment could not be made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

first=${VIRTUAL_ENV:-$PWD/.venv}/bin/python
place=${MEGATRON_DARO_SECOND:-$PWD/.venv-second-megatron}
"$first" -c 'import megatron.core.package_info' 2>/dev/null || {
    echo "$first has no Megatron-core; run bash tests/run.sh --quick first, or activate an environment that has it" >&2
    exit 1
}

version_of() { "$1" -c 'from importlib.metadata import version; print(version("megatron-core"))'; }

make_environment() {
    local site packages=("megatron-core==$wanted")
    rm -rf "$place"
    "$first" -m venv --without-pip "$place"
    site=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # The first one's .pth files count as well: packages that are installed in place.
    "$first" -c 'import site, sys; print("\n".join(p for p in sys.path if p.endswith("site-packages")))' |
        sed 's/.*/import site; site.addsitedir("&")/' >"$site/first.pth"
    echo "import sys; sys.path.insert(0, '$place/megatron')" >"$site/zz_second_megatron.pth"
    [ "$wanted" = 0.16.1 ] || packages+=('triton>=3.4,<4')
    # The file of triton must fit this Python; that of Megatron-core is for 3.12, its Python code for 3.11 as well.
    "$first" -m pip install -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
        --ignore-requires-python \
        --target "$place/megatron" "${packages[0]}"
    [ "${#packages[@]}" = 1 ] || "$first" -m pip install -q --disable-pip-version-check --no-deps \
        --target "$place/triton" "${packages[1]}"
    [ "${#packages[@]}" = 1 ] || echo "$place/triton" >"$site/triton.pth"
    version_of "$first" >"$place/first"
}

wanted=0.19.2
case $(version_of "$first") in 0.16.*) ;; *) wanted=0.16.1 ;; esac
if [ "$(version_of "$place/bin/python" 2>/dev/null)" != "$wanted" ] ||
    [ "$(cat "$place/first" 2>/dev/null)" != "$(version_of "$first")" ]; then
    echo "unpacking Megatron-core $wanted beside that of $first ($(version_of "$first")) in $place"
    make_environment
fi
"$place/bin/python" -W ignore -c "
import megatron.core
version = megatron.core.__version__.partition('+')[0]  # it adds the commit of the checkout that it lies in
assert version == '$wanted', version
print('Megatron-core', megatron.core.__version__, 'from', megatron.core.__path__[0])"

# Neither check-loss nor the rehearsal of a GPU's proof has a part of Megatron that the other files do not have.
[ $# != 0 ] || set -- -n "${MEGATRON_DARO_TEST_PROCESSES:-2}" --no-loadscope-reorder tests/parallel \
    --ignore tests/parallel/test_check_loss.py --ignore tests/parallel/test_gpu_proof_rehearsal.py \
    tests/unit/actor/test_model_options.py tests/unit/actor/test_checkpoint_format.py
MEGATRON_DARO_OTHER_PYTHON=$first "$place/bin/python" -m pytest -q "$@"
