#!/usr/bin/env bash
# Sets up what is missing, then runs every check: lint, format, types, tests.
#
#   bash tests/run.sh                          everything that a change can break
#   bash tests/run.sh --quick                  lint, format, types, unit and golden tests that are not slow: before
#                                              every commit
#   bash tests/run.sh --all                    also the heavy proofs: tests marked heavy, tests/parallel under a second
#                                              Megatron-core, tests/plugins in the environment of verl, and environments
#                                              of the package verifiers
#                                              (MEGATRON_DARO_HEAVY_TURN=K/N: one Nth of the tests marked heavy, the Kth,
#                                              and every second one of the proofs in other environments, by K;
#                                              MEGATRON_DARO_HEAVY_MINUTES=N: tests that would begin later are skipped;
#                                              MEGATRON_DARO_PROOF_MINUTES=N: so are the other proofs)
#   bash tests/run.sh tests/unit -k packing    arguments go to pytest; lint, format and types run as well
#
# Uses the virtual environment that is active, else .venv, which it makes. Packages are installed only when the
# requirements, the interpreter or the place of this checkout changed since the last time. Without arguments, and with
# --all, it also makes the environment of the SGLang servers (tools/sglang_cpu_env.sh; 2.5 GB in $MEGATRON_DARO_SGLANG,
# else in .venv-sglang), while the other stages run. pytest uses three processes ($MEGATRON_DARO_TEST_PROCESSES; many
# tests wait), but where arguments go to it.
# Every failure is told above the last line.
# The last line is "N passed, N failed, N skipped". Exit status: 0 when all passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

stage_names=() stage_seconds=() stage_results=() num_failed_stages=0

# stage NAME COMMAND...: runs a command, keeps its time and its result.
stage() {
    local name=$1 start=$SECONDS result=ok
    shift
    printf '\n=== %s ===\n' "$name"
    "$@" || result=FAILED
    stage_names+=("$name") stage_seconds+=($((SECONDS - start))) stage_results+=("$result")
    if [ "$result" = FAILED ]; then
        [ "$name" = pytest ] || num_failed_stages=$((num_failed_stages + 1))
        return 1
    fi
}

find_python() {
    local candidate
    for candidate in python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python 3.11 or newer was found (tried python3.11, python3, python); install one and run this again" >&2
    return 1
}

# Sets `python` to the interpreter of the environment to use.
choose_environment() {
    if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
        python=$VIRTUAL_ENV/bin/python
        return
    fi
    python=$PWD/.venv/bin/python
    if ! "$python" -c '' 2>/dev/null; then
        local base
        base=$(find_python) || return 1
        "$base" -m venv --clear .venv || return 1
    fi
}

# in_environment COMMAND...: for scripts that take the environment which is active.
in_environment() {
    VIRTUAL_ENV=$("$python" -c 'import sys; print(sys.prefix)') "$@"
}

print_versions() {
    "$python" - <<'PYTHON'
import platform
from importlib.metadata import version

print("python", platform.python_version())
for name in ("torch", "megatron-core", "transformers", "ray", "numpy", "math-verify", "pytest", "ruff", "mypy"):
    print(name, version(name))
PYTHON
}

declare -A beside_pids beside_logs

# beside NAME COMMAND...: begins what runs while the other stages do, in a process group of its own, so that its children
# end with it. `end_of NAME` waits for it, prints what it said and returns its exit status.
beside() {
    local name=$1
    shift
    beside_logs[$name]=$(mktemp)
    set -m
    "$@" >"${beside_logs[$name]}" 2>&1 </dev/null &
    beside_pids[$name]=$!
    set +m
}

end_of() {
    local result=0
    wait "${beside_pids[$1]}" || result=$?
    unset "beside_pids[$1]"
    cat "${beside_logs[$1]}"
    return "$result"
}

# Begins to make the SGLang environment. On a machine with a GPU the script refuses: there the tests that need servers on a
# CPU are skipped.
begin_sglang() {
    export MEGATRON_DARO_SGLANG=${MEGATRON_DARO_SGLANG:-$PWD/.venv-sglang}
    beside sglang bash tools/sglang_cpu_env.sh "$MEGATRON_DARO_SGLANG"
}

end_of_sglang() {
    end_of sglang || grep -q 'not needed: this machine has a GPU' "${beside_logs[sglang]}"
}

# Begins the proofs that need environments of their own, one after the other, beside the other stages; of each the log, the
# seconds, the result and pytest's results file stay in a folder. `wait_for_proofs` waits for their end.
begin_proofs() {
    proofs=$(mktemp -d)
    export MEGATRON_DARO_SECOND=${MEGATRON_DARO_SECOND:-$PWD/.venv-second-megatron}
    set -m
    {
        proof 1 second_megatron bash tests/second_megatron.sh
        proof 2 verl bash tests/host_environments.sh verl
        proof 1 verifiers bash tests/verifiers_hub.sh
        proof 2 agents bash tests/agents.sh
    } </dev/null &
    proofs_pid=$!
    set +m
}

# proof HALF NAME COMMAND...
proof() {
    local half=$1 name=$2 start=$SECONDS result=ok turn=${MEGATRON_DARO_HEAVY_TURN:-} skipped=
    shift 2
    [ -z "$turn" ] || [ $(((${turn%/*} + half) % 2)) = 0 ] || skipped="its turn is another commit's"
    [ "$start" -le $((60 * ${MEGATRON_DARO_PROOF_MINUTES:-600})) ] ||
        skipped="it would begin after $((start / 60)) minutes"
    if [ -n "$skipped" ]; then
        echo "skipped: $skipped" >"$proofs/$name.log"
        echo "0 skipped" >"$proofs/$name.end"
        return
    fi
    in_environment env MEGATRON_DARO_TEST_PROCESSES=1 PYTEST_ADDOPTS="--junitxml=$proofs/$name.xml" "$@" \
        >"$proofs/$name.log" 2>&1 || result=FAILED
    echo "$((SECONDS - start)) $result" >"$proofs/$name.end"
}

wait_for_proofs() {
    local name seconds result
    wait "$proofs_pid"
    proofs_pid=
    for name in second_megatron verl verifiers agents; do
        printf '\n=== %s ===\n' "$name"
        cat "$proofs/$name.log"
        read -r seconds result <"$proofs/$name.end" || { seconds=0 result=FAILED; }
        stage_names+=("$name") stage_seconds+=("$seconds") stage_results+=("$result")
        [ "$result" != FAILED ] || num_failed_stages=$((num_failed_stages + 1))
    done
}

# Ends what runs beside the stages, with its children.
clean_up() {
    local pid
    for pid in "${beside_pids[@]}" ${proofs_pid:-}; do kill -- -"$pid" 2>/dev/null; done
    rm -rf "${beside_logs[@]}" ${proofs:+"$proofs"}
}

# "passed failed skipped" from pytest's results file; errors count as failed. No file: pytest itself ended early.
counts() {
    "$python" - "$1" <<'PYTHON'
import sys
from pathlib import Path
from xml.etree import ElementTree

path = Path(sys.argv[1])
if path.is_file() and path.stat().st_size:
    suite = ElementTree.parse(path).getroot().find("testsuite")
    total, skipped = int(suite.get("tests")), int(suite.get("skipped"))
    failed = int(suite.get("failures")) + int(suite.get("errors"))
    print(max(total - failed - skipped, 0), failed, skipped)
else:
    print(0, 1, 0)
PYTHON
}

# "ID<tab>first line of its error" of each test that failed, from pytest's results file.
failures() {
    "$python" - "$1" <<'PYTHON'
import sys
from pathlib import Path
from xml.etree import ElementTree

path = Path(sys.argv[1])
told = set()
for case in ElementTree.parse(path).getroot().iter("testcase") if path.is_file() and path.stat().st_size else ():
    trouble = case.find("failure") if case.find("failure") is not None else case.find("error")
    if trouble is None:
        continue
    parts, classes = case.get("classname").split("."), []
    while parts and not Path(*parts).with_suffix(".py").is_file():
        classes.insert(0, parts.pop())
    place = str(Path(*parts).with_suffix(".py")) if parts else ".".join(classes)
    test = "::".join([place, *(classes if parts else ()), case.get("name")])
    if test not in told:
        print(test, (trouble.get("message") or "no message").splitlines()[0][:300], sep="\t")
    told.add(test)
PYTHON
}

summarize() {
    local i more passed=0 failed=0 skipped=0
    printf '\n=== stages ===\n'
    for i in "${!stage_names[@]}"; do
        printf '%-14s %5d s   %s\n' "${stage_names[$i]}" "${stage_seconds[$i]}" "${stage_results[$i]}"
    done
    printf '%-14s %5d s\n' total "$SECONDS"
    if [ -n "${results:-}" ]; then
        read -r passed failed skipped < <(counts "$results")
        [ -s "$results" ] || echo "pytest wrote no results: it was killed, timed out, or could not start (see above)"
        failures "$results" | sed 's/^/failed: /'
        rm -f "$results"
        if [ "$failed" = 0 ] && [ "$pytest_result" = FAILED ]; then
            echo "pytest failed without a failing test (counted as one): no test matched, or a plugin failed"
            failed=1
        fi
    fi
    for i in ${proofs:+"$proofs"/*.xml}; do
        read -r -a more < <(counts "$i") # what failed there has failed its stage
        passed=$((passed + more[0])) skipped=$((skipped + more[2]))
    done
    [ "$num_failed_stages" = 0 ] || echo "stages that failed beside pytest: $num_failed_stages (counted as failed)"
    echo "$passed passed, $((failed + num_failed_stages)) failed, $skipped skipped"
}

# Sets `tier` (quick, default, all or chosen) and `pytest_arguments`.
choose_tier() {
    local turn=${MEGATRON_DARO_HEAVY_TURN:-} minutes=${MEGATRON_DARO_HEAVY_MINUTES:-}
    local processes=(-n "${MEGATRON_DARO_TEST_PROCESSES:-3}" --no-loadscope-reorder)
    case "${1:-}" in
        '') tier=default pytest_arguments=("${processes[@]}") ;;
        --all)
            tier=all pytest_arguments=("${processes[@]}" --heavy)
            pytest_arguments+=(${turn:+--heavy-turn "$turn"} ${minutes:+--heavy-minutes "$minutes"})
            ;;
        --quick) tier=quick pytest_arguments=("${processes[@]}" -m "not slow" tests/unit tests/golden) ;;
        *) tier=chosen pytest_arguments=("$@") ;;
    esac
    if [ "$tier" != chosen ] && [ $# -gt 1 ]; then
        echo "tests/run.sh: got '$*'; allowed: --quick or --all alone, or arguments of pytest" >&2
        exit 2
    fi
}

main() {
    local failed=0
    choose_tier "$@"
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    case "$tier" in default | all) begin_sglang ;; esac
    stage environment choose_environment && stage install bash tools/install_packages.sh "$python" &&
        stage versions print_versions || {
        summarize
        return 1
    }
    stage "ruff check" "$python" -m ruff check . || failed=1
    stage "ruff format" "$python" -m ruff format --check . || failed=1
    beside mypy "$python" -m mypy # one core, most of a minute
    case "$tier" in default | all) stage sglang end_of_sglang || failed=1 ;; esac
    [ "$tier" != all ] || begin_proofs
    [ "$tier" != all ] || stage slurm bash tests/slurm_install.sh --accounts
    [ "$tier" != all ] || stage mooncake bash tests/mooncake_install.sh "$python" "$MEGATRON_DARO_SGLANG/bin/python"
    [ "$tier" != all ] || in_environment stage wheel bash tests/wheel.sh || failed=1
    [ "$tier" != all ] || in_environment stage "algo wheel" bash tests/algo_wheel.sh || failed=1
    [ "$tier" != all ] || in_environment stage "triton kernels" bash tests/triton_kernels.sh || failed=1
    results=$(mktemp)
    stage pytest "$python" -m pytest --durations=15 --junitxml="$results" "${pytest_arguments[@]}" || failed=1
    pytest_result=${stage_results[-1]}
    stage mypy end_of mypy || failed=1
    [ "$tier" != all ] || wait_for_proofs
    summarize
    [ "$failed$num_failed_stages" = 00 ]
}

main "$@"
