"""The batch script of a job: readable, complete, without secrets; `sbatch SCRIPT` alone works too.

Place in the data flow: ClusterFile and Job -> text -> submission.py. What runs on the nodes is node.py's.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

from megatron_daro.slurm.cluster_file import ClusterFile


@dataclass(frozen=True, slots=True)
class Job:
    """name; nodes; run_dir and directory (where it was submitted), absolute; train: arguments of `megatron-daro train`
    after the command's name; steps: of the run."""

    name: str
    nodes: int
    run_dir: Path
    directory: Path
    train: tuple[str, ...]
    steps: int

    @property
    def folder(self) -> Path:
        """Where the script and the logs of all attempts are."""
        return self.run_dir / "slurm"


class _BashTemplate(Template):
    """`@{name}` is replaced, so that bash's own dollars stay as they are."""

    delimiter = "@"


def script_of(job: Job, cluster: ClusterFile) -> str:
    """Return the batch script."""
    return _BashTemplate(_SCRIPT).substitute(
        options="\n".join(f"#SBATCH {option}" for option in _options(job, cluster)),
        directory=_quoted(job.directory),
        folder=_quoted(job.folder),
        setup="\n".join([*(f"export {k}={shlex.quote(v)}" for k, v in _environment(cluster)), *cluster.setup]),
        image_check=_image_check(cluster),
        attempts=cluster.attempts,
        node_command=" \\\n    ".join(_node_command(job, cluster)),
        exclude="yes" if cluster.exclude_bad_nodes else "",
        grace=int(cluster.term_grace_s) + 5,
    )


def _quoted(value: object) -> str:
    return shlex.quote(str(value))


def _options(job: Job, cluster: ClusterFile) -> Iterator[str]:
    yield f"--job-name={job.name}"
    yield f"--partition={cluster.partition}"
    if cluster.account:
        yield f"--account={cluster.account}"
    if cluster.qos:
        yield f"--qos={cluster.qos}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    if cluster.gpus_per_node:
        yield f"--gpus-per-node={cluster.gpus_per_node}"
    if cluster.cpus_per_node:
        yield f"--cpus-per-task={cluster.cpus_per_node}"
    if cluster.exclusive:
        yield "--exclusive"
    yield f"--time={cluster.time}"
    yield f"--output={job.folder}/job_%j.log"
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=B:USR1@{cluster.signal_before_s}"
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


def _node_command(job: Job, cluster: ClusterFile) -> Iterator[str]:
    """Return the parts of the command that srun starts on each node, a line each."""
    container = cluster.container
    if container and container.runtime == "pyxis":
        yield _quoted(f"--container-image={container.image}")
        yield _quoted("--container-mounts=" + ",".join(container.mounts))
        yield _quoted(f"--container-workdir={job.directory}")
    if container and container.runtime == "apptainer":
        binds = " ".join(_quoted(f"--bind={mount}") for mount in container.mounts)
        yield f"apptainer exec --nv {binds} --pwd {_quoted(job.directory)} {_quoted(container.image)}"
    yield f"{_quoted(cluster.python)} -m megatron_daro.slurm.node"
    yield '--attempt-dir "$attempt_dir" --attempt "$attempt"'
    yield f"--run-dir {_quoted(job.run_dir)} --gpus {cluster.gpus_per_node} --free-disk-gib {cluster.free_disk_gib:g}"
    yield f"--check-minutes {cluster.check_minutes:g} --stall-minutes {cluster.stall_minutes:g}"
    yield f"--term-grace-s {cluster.term_grace_s:g}"
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

cd @{directory} || exit 1
folder=@{folder}
mkdir -p "$folder"

# give_up CAUSE: the cause is the last line of the log.
give_up() {
    echo "job $SLURM_JOB_ID: $1"
    exit 1
}

# leave_out NODES: the job will not run on them again. Slurm takes this only for a job that waits.
leave_out() {
    known=$(scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* ExcNodeList=\\([^ ]*\\).*/\\1/p')
    [ "$known" != "(null)" ] || known=''
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${known:+$known,}$1" ||
        echo "job $SLURM_JOB_ID: Slurm refused to leave out $1"
}

# requeue CAUSE [NODES]: the job waits in the queue again, under its number, and goes on from the newest checkpoint;
# without these nodes.
requeue() {
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)
    # Else it was cancelled, or Slurm has requeued it itself.
    [ "$state" = RUNNING ] || give_up "$1; not requeued, since the job is ${state:-gone}"
    [ "$attempt" -lt @{attempts} ] || give_up "$1; attempt $attempt was the last of @{attempts}"
    echo "job $SLURM_JOB_ID: $1; requeued"
    [ -z "$2" ] || trap '' TERM # by which Slurm ends this script, a moment too early
    scontrol requeue "$SLURM_JOB_ID" || give_up "$1; Slurm refused to requeue it"
    [ -z "$2" ] || leave_out "$2"
    sleep 60 # Slurm ends this script meanwhile
    exit 1
}

[ ! -e "$folder/finished" ] || {
    echo "job $SLURM_JOB_ID: the run is finished already"
    exit 0
}
@{setup}
@{image_check}
# Every start of the run has a number and a directory of its own; the number is in its metrics.
attempt=$(($(find "$folder" -maxdepth 1 -name 'attempt_*' | wc -l) + 1))
attempt_dir=$(printf '%s/attempt_%03d' "$folder" "$attempt")
mkdir -p "$attempt_dir" || give_up "$attempt_dir cannot be made; is the disk full?"
echo "job $SLURM_JOB_ID: attempt $attempt on $SLURM_JOB_NODELIST, logs in $attempt_dir"

# USR1 comes before the time limit and on preemption: training saves a checkpoint and ends. The first node looks for
# the file, since a signal through srun would hit every process of the job. TERM comes with scancel.
ended_by=''
trap 'touch "$attempt_dir/save"' USR1
trap 'ended_by=TERM; kill -TERM "$step" 2>/dev/null' TERM

# One process a node: it checks the node, joins Ray and, on the first one, trains.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=@{grace} --output="$attempt_dir/node_%t_%N.log" \\
    @{node_command} 2>"$attempt_dir/srun.log" &
step=$!
while :; do
    wait "$step"
    code=$?
    kill -0 "$step" 2>/dev/null || break # wait returns early when a signal was trapped
done

# The first node wrote how it ended: a word, a sentence, and nodes that the word is about.
line() { sed -n "$1p" "$attempt_dir/result" 2>/dev/null; }
kind=$(line 1) cause=$(line 2) nodes=$(line 3)
case "$kind" in
    finished)
        touch "$folder/finished"
        echo "job $SLURM_JOB_ID: $cause"
        exit 0
        ;;
    saved) requeue "$cause" ;;
    node_lost) requeue "$cause" ;;
    bad_nodes)
        [ -n "@{exclude}" ] || give_up "$cause"
        requeue "$cause; left out from now on: $nodes" "$nodes"
        ;;
    failed) give_up "$cause" ;;
esac
[ "$ended_by" != TERM ] || give_up "cancelled"
failed=$(cat "$attempt_dir"/failed_* 2>/dev/null | tail -1)
[ -z "$failed" ] || give_up "$failed"
[ -z "$kind" ] || requeue "$cause"
# No node has said anything: the last words of one, else srun's own, such as an option or an image it does not know.
last=$(tail -qn 1 "$attempt_dir"/node_*.log 2>/dev/null | grep . | tail -1)
[ -n "$last" ] || last=$(grep -m 1 -i -e error -e unrecognized -e invalid "$attempt_dir/srun.log")
[ -e "$attempt_dir/head.json" ] || give_up "the nodes did not start (srun: $code): ${last:-no word in $attempt_dir}"
requeue "the first node ended without a word (srun: $code), as when a node is lost"
"""
