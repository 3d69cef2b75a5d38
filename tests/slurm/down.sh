#!/usr/bin/env bash
# Ends the Slurm that up.sh brought up under $R: jobs first, then its processes, by their pid files.
R=${R:-${TMPDIR:-/tmp}/slurm-test}
export SLURM_CONF=$R/etc/slurm.conf
squeue -h -o %A 2>/dev/null | xargs -r scancel 2>/dev/null
sleep 1
for file in "$R"/run/slurmd.*.pid "$R/run/slurmctld.pid" "$R/run/slurmdbd.pid" "$R/run/mariadbd.pid" "$R/run/munged.pid"; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    kill "$pid" 2>/dev/null
    for _ in $(seq 1 50); do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    kill -0 "$pid" 2>/dev/null && echo "still alive: $file $pid"
done
exit 0
