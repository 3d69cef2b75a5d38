# Sourced by the run.sh of quickstart, smollm2, tool_use and agent in examples: their arguments and stages.
#
# Set before: `name` (of examples/NAME and runs/NAME), `minutes` and `minutes_sglang` (what training takes, for the one
# line that says so), the functions `make_base`, which makes runs/NAME-base with `$bin/python`, and `own_options`, which
# may set the array `own` to options that depend on `engine` or on this machine; `go_on=yes` goes on with a run that was
# killed after its first checkpoint.
folder=examples/$name

# refuse GOT: what is allowed instead, on stderr; the end.
refuse() {
    echo "run.sh: got '$1'; allowed: --engine embedded, --engine sglang, --help, options of the run as a.b=c" >&2
    exit 2
}

# Sets `engine`, and `options` to the options of the run.
read_arguments() {
    engine=embedded options=()
    while [ $# -gt 0 ]; do
        case "$1" in
            -h | --help)
                sed -n '2,/^[^#]/s/^# //p' "$folder/run.sh"
                exit 0
                ;;
            --engine=*) engine=${1#*=} ;;
            --engine)
                engine=${2-}
                [ $# -eq 1 ] || shift
                ;;
            -* | '') refuse "$1" ;;
            *) options+=("$1") ;;
        esac
        shift
    done
    case "$engine" in embedded | sglang) ;; *) refuse "--engine $engine" ;; esac
}

# Sets `run` to the directory of the run, and `own_servers` if the user names an interpreter for the servers.
# The options of the user come last, so they win.
complete_options() {
    local option servers=()
    run=runs/$name own_servers='' own=()
    if [ "$engine" = sglang ]; then
        run=runs/$name-sglang
        servers=("engine=$(cat examples/quickstart/sglang.yaml)" "trainer.run_dir=$run")
    fi
    own_options
    options=("${servers[@]}" "${own[@]}" "${options[@]}")
    for option in "${options[@]}"; do
        case "$option" in
            trainer.run_dir=*) run=${option#*=} ;;
            engine.sglang.python=*) own_servers=yes ;;
        esac
    done
}

# stage TEXT: one line before each stage, with the seconds since the start.
stage() { printf '[%3d s] %s\n' "$SECONDS" "$1"; }

find_python() {
    local candidate
    for candidate in python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "run.sh: no Python 3.11 or newer was found (tried python3.11, python3, python); install one" >&2
    return 1
}

# Sets `bin` to the folder with the programs of the environment to use.
choose_environment() {
    local base
    if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
        bin=$VIRTUAL_ENV/bin
        stage "environment: $VIRTUAL_ENV, which is active"
        return
    fi
    bin=$PWD/.venv/bin
    if ! "$bin/python" -c '' 2>/dev/null; then
        stage "environment: making .venv"
        base=$(find_python)
        "$base" -m venv --clear .venv
    fi
}

# An earlier run is never overwritten.
move_aside() {
    local old
    [ -e "$1" ] || return 0
    old=$1-$(date -r "$1" +%Y%m%d-%H%M%S)
    while [ -e "$old" ]; do old=$old-again; done
    mv "$1" "$old"
    stage "the earlier run is now $old"
}

# Whether a run has a checkpoint and was not finished: the trained model is written last.
was_killed() { [ -n "${go_on:-}" ] && [ -e "$run/checkpoints/latest" ] && [ ! -e "$run/hf" ]; }

train_and_report() {
    local report resume=()
    # Before the earlier run is moved: a mistake in the options moves nothing.
    "$bin/megatron-daro" train "$folder/config.yaml" "${options[@]}" "trainer.run_dir=$(mktemp -u)" --dry-run >/dev/null
    if was_killed; then
        resume=(--resume)
        stage "going on with $run, which was not finished"
    else
        move_aside "$run"
    fi
    [ "$engine" = embedded ] || minutes=$minutes_sglang
    stage "training: $run (engine: $engine; about $minutes minutes)"
    "$bin/megatron-daro" train "$folder/config.yaml" "${options[@]}" "${resume[@]}"
    stage "report"
    report=$("$bin/megatron-daro" report "$run")
    stage "done"
    "$bin/python" examples/quickstart/summary.py "$run"
    echo "report, for a browser: $report"
    if [ -d "$run/hf" ]; then echo "trained model, for transformers, vLLM and SGLang: $run/hf"; fi
}

one_command() {
    read_arguments "$@"
    complete_options
    choose_environment
    stage "packages"
    bash tools/install_packages.sh "$bin/python"
    if [ "$engine" = sglang ] && [ -z "$own_servers" ]; then
        stage "SGLang: its environment (one to three minutes, unless it is there already)"
        bash tools/sglang_cpu_env.sh
    fi
    make_base
    train_and_report
}
