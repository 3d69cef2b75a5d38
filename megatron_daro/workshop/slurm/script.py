"""The batch script of a job: readable, complete, without secrets; `sbatch SCRIPT` alone works too.

ClusterFile and Job -> text -> submission.py. The script runs node.py on the nodes. Values are read by sbatch (its
options), bash (everything else) and Slurm's patterns for log files, each with its own escapes; control characters are
refused before they come here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

from megatron_daro.workshop.slurm.cluster_file import ClusterFile


@dataclass(frozen=True, slots=True)
class Job:
    """name; nodes; run_dir and directory (where it was submitted), absolute; train: arguments of `megatron-daro train`
    after the command's name; steps: of the run; signal_before_s: seconds before the time limit at which training is
    asked to save; gres: GPUs per node that Slurm is asked for.
    """

    name: str
    nodes: int
    run_dir: Path
    directory: Path
    train: tuple[str, ...]
    steps: int
    signal_before_s: int
    gres: int

    @property
    def folder(self) -> Path:
        """Where the script and the logs of all attempts are."""
        return self.run_dir / "slurm"


class _BashTemplate(Template):
    """`@{name}` is replaced, so that bash's own dollars stay as they are."""

    delimiter = "@"


def script_of(job: Job, cluster: ClusterFile) -> str:
    """Return the batch script."""
    container = list(_container_options(job, cluster))
    return _BashTemplate(_SCRIPT).substitute(
        options="\n".join(f"#SBATCH {_sbatch_quoted(option)}" for option in _options(job, cluster)),
        directory=_quoted(job.directory),
        folder=_quoted(job.folder),
        own_log="" if _is_plain_pattern(job.folder) else 'exec >>"$folder/job_$SLURM_JOB_ID.log" 2>&1\n',
        setup="\n".join([*(f"export {k}={shlex.quote(v)}" for k, v in _environment(cluster)), *cluster.setup]),
        image_check=_image_check(cluster),
        attempts=cluster.attempts,
        container=" ".join(container),
        enter=_enter(job, cluster),
        lost_node=_lost_node(cluster),
        end_of_spares=_END_OF_SPARES.replace("GRACE", str(_grace_s(cluster))) if cluster.spare_nodes else "",
        node_command=" \\\n        ".join(_node_command(job, cluster)),
        exclude="yes" if cluster.exclude_bad_nodes else "",
    )


def _lost_node(cluster: ClusterFile) -> str:
    """Return srun's options for the end of a node: it ends all nodes, or no other where nodes may be lost."""
    if cluster.spare_nodes:
        return "--no-kill --kill-on-bad-exit=0 --wait=0"
    return f"--kill-on-bad-exit=1 --wait={_grace_s(cluster)}"


def _grace_s(cluster: ClusterFile) -> int:
    """Return how many seconds the other nodes have to end after the first one that ends."""
    return int(cluster.term_grace_s) + 5


_END_OF_SPARES = """\
# The end of a node is not that of the others here; that of the first one is, also where one is frozen for ever.
(
    until [ -e "$attempt_dir/result" ]; do sleep 2; done
    sleep GRACE
    kill -TERM "$payload" 2>/dev/null && sleep GRACE && kill -KILL "$payload" 2>/dev/null
) &
"""


def _quoted(value: object) -> str:
    return shlex.quote(str(value))


def _sbatch_quoted(option: str) -> str:
    """Quote an option for sbatch, which ends a word at a space or #, and takes backslashes away (its opt.c)."""
    if re.fullmatch(r"[\w@%+=:,./~-]+", option):
        return option
    name, equals, value = option.partition("=")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def _is_plain_pattern(folder: Path) -> bool:
    """Return whether Slurm takes the path as it is: in names of logs % and backslash mean something."""
    return not {"%", "\\"} & set(str(folder))


def _options(job: Job, cluster: ClusterFile) -> Iterator[str]:
    yield f"--job-name={job.name}"
    yield f"--partition={cluster.partition}"
    if cluster.account:
        yield f"--account={cluster.account}"
    if cluster.qos:
        yield f"--qos={cluster.qos}"
    yield f"--nodes={job.nodes}"
    if cluster.spare_nodes:
        yield "--no-kill"  # the job outlives a node
    yield "--ntasks-per-node=1"
    if job.gres:
        yield f"--gres=gpu:{job.gres}"
    if cluster.cpus_per_node:
        yield f"--cpus-per-task={cluster.cpus_per_node}"
    if cluster.memory_gib:
        yield f"--mem={cluster.memory_gib}G"
    elif cluster.exclusive:
        yield "--mem=0"  # all of it: many sites give a default share even to a job that has the node for itself
    if cluster.exclusive:
        yield "--exclusive"
    yield f"--time={cluster.time}"
    yield f"--output={job.folder}/job_%j.log" if _is_plain_pattern(job.folder) else "--output=/dev/null"
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=B:USR1@{job.signal_before_s}"
    yield from cluster.sbatch


def _environment(cluster: ClusterFile) -> Iterator[tuple[str, str]]:
    if cluster.network_interface:
        yield "GLOO_SOCKET_IFNAME", cluster.network_interface
        yield "NCCL_SOCKET_IFNAME", cluster.network_interface
    yield from cluster.environment.items()


def _image_check(cluster: ClusterFile) -> str:
    """Return lines that refuse an image file that is not there; names of a registry are the runtime's business."""
    if cluster.container is None or not cluster.container.image.startswith(("/", ".")):
        return ""
    image = _quoted(cluster.container.image)
    return f'[ -e {image} ] || give_up "the container image "{image}" is not there on $(hostname)"\n'


def _container_options(job: Job, cluster: ClusterFile) -> Iterator[str]:
    """Yield srun's own options for a container."""
    container = cluster.container
    if container and container.runtime == "pyxis":
        yield _quoted(f"--container-image={container.image}")
        if container.mounts:
            yield _quoted("--container-mounts=" + ",".join(container.mounts))
        yield _quoted(f"--container-workdir={job.directory}")


def _enter(job: Job, cluster: ClusterFile) -> str:
    """Return the prefix with which a command runs in the container; empty if srun enters it or there is none."""
    container = cluster.container
    if container is None or container.runtime != "apptainer":
        return ""
    binds = " ".join(_quoted(f"--bind={mount}") for mount in container.mounts)
    return f"apptainer exec --nv {binds} --pwd {_quoted(job.directory)} {_quoted(container.image)} "


def _node_command(job: Job, cluster: ClusterFile) -> Iterator[str]:
    """Return the parts of the command that runs on each node, a line each."""
    yield f"{_quoted(cluster.python)} -m megatron_daro.workshop.slurm.node"
    yield '--attempt-dir "$attempt_dir" --attempt "$attempt"'
    yield f"--run-dir {_quoted(job.run_dir)} --gpus {cluster.gpus_per_node} --free-disk-gib {cluster.free_disk_gib:g}"
    yield f"--check-minutes {cluster.check_minutes:g} --stall-minutes {cluster.stall_minutes:g}"
    yield f"--term-grace-s {cluster.term_grace_s:g}"
    if cluster.spare_nodes:
        yield f"--may-lose {cluster.spare_nodes}"
    if cluster.cpus_per_node and not cluster.gpus_per_node:
        yield f"--cores {cluster.cpus_per_node}"
    if cluster.network_interface:
        yield f"--interface {_quoted(cluster.network_interface)}"
    yield from (f"--address {_quoted(f'{node}={address}')}" for node, address in cluster.addresses.items())
    yield "-- " + " ".join(map(_quoted, job.train))


_SCRIPT = """\
#!/bin/bash
# Written by `megatron-daro submit`. It may be edited, and submitted by itself: sbatch THIS_FILE
@{options}

# USR1 comes before the time limit and on preemption; TERM on preemption, at the time limit and with scancel. From here
# on neither ends this script: after either one the job is requeued, unless it was cancelled. Training learns of them by
# a file: a signal through srun would hit every process of the job, and with TERM srun kills them at once.
asked='' attempt=0 attempt_dir='' payload=''
trap 'asked=USR1; [ -z "$attempt_dir" ] || touch "$attempt_dir/save"' USR1
trap 'asked=TERM; [ -z "$attempt_dir" ] || touch "$attempt_dir/save"' TERM

# Not for this job: what the shell that submitted it wants of its own srun (`srun -c1` leaves SLURM_CPU_BIND behind).
# Its cores as well, which newer Slurm has in two variables: srun refuses two numbers, and gives a node's all without.
unset ${!SLURM_CPU_BIND@@} ${!SLURM_MEM_BIND@@} SLURM_CPUS_PER_TASK SLURM_DISTRIBUTION SLURM_EXACT SLURM_GPUS
unset SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_HINT SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_NPROCS SLURM_NTASKS
unset SLURM_OVERCOMMIT SLURM_THREADS_PER_CORE SLURM_TRES_PER_TASK

folder=@{folder}
mkdir -p "$folder"
@{own_log}
# give_up CAUSE: the cause is the last line of the log.
give_up() {
    echo "job $SLURM_JOB_ID: $1"
    exit 1
}

# left_out NODES: these and those that the job has left out before.
left_out() {
    known=$(scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* ExcNodeList=\\([^ ]*\\).*/\\1/p')
    [ "$known" != "(null)" ] || known=''
    echo "${known:+$known,}$1"
}

# enough_without NODES: whether the partition has nodes for this job beside those; else it would wait for ever.
enough_without() {
    out=$(scontrol show hostnames "$(left_out "$1")")
    all=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format=%N | sort -u)
    [ -z "$all" ] || [ "$(echo "$all" | grep -cvxF "$out")" -ge "$SLURM_JOB_NUM_NODES" ]
}

# leave_out NODES: the job will not run on them again. Slurm takes this only for a job that waits.
leave_out() {
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$(left_out "$1")" ||
        echo "job $SLURM_JOB_ID: Slurm refused to leave out $1"
}

# requeue CAUSE [NODES]: the job waits in the queue again, under its number, and goes on from the newest checkpoint;
# without these nodes.
requeue() {
    for _ in 1 2 3 4 5; do # a controller that is busy for a moment must not cost the run
        state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format='%T %r' 2>/dev/null)
        [ -z "$state" ] || break
        sleep 2
    done
    case "$state" in
        RUNNING* | *TimeLimit) ;;
        *) give_up "cancelled, or put back by Slurm itself (${state:-no answer of squeue}); $1" ;;
    esac
    [ "$attempt" -lt @{attempts} ] || give_up "$1; attempt $attempt was the last of @{attempts}"
    echo "job $SLURM_JOB_ID: $1; requeued"
    [ -z "$2" ] || trap '' TERM # by which Slurm ends this script, a moment too early
    scontrol requeue "$SLURM_JOB_ID" || give_up "$1; Slurm refused to requeue it"
    [ -z "$2" ] || leave_out "$2"
    sleep 60 # Slurm ends this script meanwhile
    exit 1
}

cd @{directory} || give_up "the working directory "@{directory}" is not there on $(hostname)"
[ ! -e "$folder/finished" ] || {
    echo "job $SLURM_JOB_ID: the run is finished already"
    exit 0
}
@{image_check}
# Every start of the run has a number and a directory of its own; the number is in its metrics.
numbers=$(find "$folder" -maxdepth 1 -name 'attempt_*' | sed -n 's/.*attempt_0*\\([0-9][0-9]*\\)$/\\1/p')
attempt=$(($(printf '0\\n%s\\n' "$numbers" | sort -n | tail -1) + 1))
attempt_dir=$(printf '%s/attempt_%03d' "$folder" "$attempt")
mkdir "$attempt_dir" || give_up "$attempt_dir cannot be made; is the disk full, or another job in this run directory?"
[ -z "$asked" ] || requeue "asked to end ($asked) before anything started"
echo "job $SLURM_JOB_ID: attempt $attempt on $SLURM_JOB_NODELIST, logs in $attempt_dir"

# What srun starts on each node: each node has a log of its own, whatever characters its path has.
# shellcheck disable=SC2016
with_log='{ exec >>"$0/node_${SLURM_PROCID}_$SLURMD_NODENAME.log"; } 2>/dev/null || {
    echo "error: $SLURMD_NODENAME cannot write into $0: is it on a file system that all nodes share?" >&2
    exit 1
}
exec "$@@" 2>&1'

# A shell, or a command, beside the training on its first node: bash attach.sh [COMMAND...]
{
    printf '#!/bin/bash\\nset -- %q %q "$@@"\\n' "$SLURM_JOB_ID" "$attempt_dir"
    cat <<'END'
job=$1 attempt_dir=$2
shift 2
[ -e "$attempt_dir/attach" ] || { echo "nothing to attach to: Ray does not run in $attempt_dir" >&2; exit 1; }
. "$attempt_dir/attach" || exit 1
[ $# -gt 0 ] || set -- bash -i
exec srun --jobid="$job" --overlap --nodes=1 --ntasks=1 --nodelist="$first_node" @{container} @{enter}"$@@"
END
} >"$folder/attach.sh"

# In the background, so that no command of the setup keeps a signal waiting. One process a node: it checks the node,
# joins Ray and, on the first one, trains.
(
@{setup}
    touch "$attempt_dir/started"
    exec srun --ntasks-per-node=1 --cpu-bind=none @{lost_node} @{container} \\
        bash -c "$with_log" "$attempt_dir" @{enter}@{node_command} \\
        >"$attempt_dir/srun.log" 2>&1
) &
payload=$!
@{end_of_spares}while :; do
    # Nothing is lost by ending the setup; what has started ends by itself when it sees that it is asked to.
    [ -z "$asked" ] || [ -e "$attempt_dir/started" ] || kill -TERM "$payload" 2>/dev/null
    wait "$payload"
    code=$?
    kill -0 "$payload" 2>/dev/null || break # wait returns early when a signal was trapped
done

# The first node wrote how it ended: a word, a sentence, and nodes that the word is about.
line() { sed -n "$1p" "$attempt_dir/result" 2>/dev/null; }
kind=$(line 1) cause=$(line 2) nodes=$(line 3)
[ "$kind" != finished ] || {
    touch "$folder/finished"
    echo "job $SLURM_JOB_ID: $cause"
    exit 0
}
[ -z "$asked" ] || requeue "${cause:-asked to end ($asked) before the first node could say anything}"
[ -e "$attempt_dir/started" ] || give_up "the setup ended with code $code; its words are above"
case "$kind" in
    saved | stopped | node_lost | unstarted | gpu_fault) requeue "$cause" ;;
    bad_nodes)
        [ -n "@{exclude}" ] || give_up "$cause"
        enough_without "$nodes" || give_up "$cause; without $nodes $SLURM_JOB_PARTITION has too few nodes for this job"
        requeue "$cause; left out from now on: $nodes" "$nodes"
        ;;
    failed) give_up "$cause" ;;
esac
failed=$(cat "$attempt_dir"/failed_* 2>/dev/null | tail -1)
[ -n "$failed" ] || failed=$(sed -n 's/^error: //p' "$attempt_dir/srun.log" | head -1)
[ -z "$failed" ] || give_up "$failed"
[ -z "$kind" ] || requeue "$cause"
# No node has said anything: the last words of one, else srun's own, such as an option or an image it does not know.
last=$(tail -qn 1 "$attempt_dir"/node_*.log 2>/dev/null | grep . | tail -1)
[ -n "$last" ] || last=$(grep -m 1 -i -e fatal -e error -e unrecognized -e invalid "$attempt_dir/srun.log")
[ -e "$attempt_dir/head.json" ] || give_up "the nodes did not start (srun: $code): ${last:-no word in $attempt_dir}"
requeue "the first node ended without a word (srun: $code), as when a node is lost"
"""
