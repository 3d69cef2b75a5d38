#!/usr/bin/env bash
# Brings up a real Slurm with NODES (two) "nodes" of eight fake GPUs on this machine, loopback only, everything under $R.
# Needs root and what tests/slurm_install.sh installs. Then: export SLURM_CONF=$R/etc/slurm.conf. End it with down.sh.
# PORT is the first of its ports; a node that says nothing is down after SLURMD_TIMEOUT seconds (60). With ACCOUNTS=yes only the account "research" may run jobs (accounts.sh).
set -euo pipefail
R=${R:-${TMPDIR:-/tmp}/slurm-test}
host=$(hostname -s)
nodes=${NODES:-2}
port=${PORT:-16817}
mkdir -p "$R"/{etc,run,log,state,spool,dev}
chmod 755 "$R" "$R"/*
[ -s "$R/etc/munge.key" ] || dd if=/dev/urandom of="$R/etc/munge.key" bs=1024 count=1 status=none
chmod 400 "$R/etc/munge.key"
munged --key-file="$R/etc/munge.key" --socket="$R/run/munge.socket" --pid-file="$R/run/munged.pid" \
    --log-file="$R/log/munged.log" --seed-file="$R/run/munge.seed"

# Eight character devices stand for the GPUs of both nodes.
for gpu in 0 1 2 3 4 5 6 7; do
    [ -e "$R/dev/gpu$gpu" ] || mknod "$R/dev/gpu$gpu" c 1 3
done
echo "Name=gpu File=$R/dev/gpu[0-7]" >"$R/etc/gres.conf"

cat >"$R/etc/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket=$R/run/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$port
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SrunPortRange=61000-61400
SlurmctldPidFile=$R/run/slurmctld.pid
SlurmctldLogFile=$R/log/slurmctld.log
StateSaveLocation=$R/state
SlurmdPidFile=$R/run/slurmd.%n.pid
SlurmdLogFile=$R/log/slurmd.%n.log
SlurmdSpoolDir=$R/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=200000,batch_sched_delay=0,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=10
MinJobAge=600
MessageTimeout=30
SlurmctldTimeout=60
SlurmdTimeout=${SLURMD_TIMEOUT:-60}
InactiveLimit=0
GresTypes=gpu
CONF
for i in $(seq 1 $nodes); do
    echo "NodeName=node$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + i)) CPUs=4 RealMemory=4000 Gres=gpu:8 State=UNKNOWN"
    mkdir -p "$R/spool/node$i"
done >>"$R/etc/slurm.conf"
cat >>"$R/etc/slurm.conf" <<CONF
PartitionName=main Nodes=node[1-$nodes] Default=YES MaxTime=01:00:00 State=UP OverSubscribe=NO PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=node[1-$nodes] MaxTime=01:00:00 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=closed Nodes=node[1-$nodes] MaxTime=01:00:00 State=DOWN
CONF
export SLURM_CONF=$R/etc/slurm.conf
rm -rf "$R"/state/*
if [ "${ACCOUNTS:-}" = yes ]; then
    R=$R PORT=$((port + 10)) bash "$(dirname "${BASH_SOURCE[0]}")/accounts.sh"
else
    echo AccountingStorageType=accounting_storage/none >>"$SLURM_CONF"
fi
slurmctld -c -f "$SLURM_CONF"
for i in $(seq 1 $nodes); do slurmd -N "node$i" -f "$SLURM_CONF"; done
for _ in $(seq 1 300); do
    [ "$(sinfo -h -t idle -o %D -p main 2>/dev/null)" = "$nodes" ] && exit 0
    sleep 0.2
done
echo "up.sh: the nodes are not idle after 60 s (does another Slurm have port $port?); look at $R/log" >&2
exit 1
