#!/usr/bin/env bash
# Accounts for the Slurm that up.sh brings up (it calls this): a database on a socket under $R, slurmdbd on port $PORT of
# the loopback, the cluster, and one account, "research", whose only user is root. Other accounts are refused.
# Needs Debian's slurmdbd and mariadb-server-core (tests/slurm_install.sh --accounts).
set -euo pipefail
sql=/usr/share/mysql
options=(--no-defaults --datadir="$R/db" --user=root --skip-grant-tables --innodb-buffer-pool-size=32M --skip-log-bin)
export MYSQL_UNIX_PORT=$R/run/mysql.socket SLURM_CONF=$R/etc/slurm.conf
mkdir -p "$R/db"
{
    printf 'CREATE DATABASE mysql;\nUSE mysql;\n'
    cat $sql/mysql_system_tables.sql $sql/mysql_system_tables_data.sql
} | mariadbd "${options[@]}" --bootstrap --log-error="$R/log/bootstrap.log"
mariadbd "${options[@]}" --socket="$MYSQL_UNIX_PORT" --skip-networking --pid-file="$R/run/mariadbd.pid" \
    --log-error="$R/log/mariadbd.log" </dev/null >/dev/null 2>&1 &

# wait_for WHAT COMMAND...: until the command succeeds.
wait_for() {
    local what=$1 end=$((SECONDS + 30))
    shift
    while [ "$SECONDS" -lt "$end" ]; do
        "$@" >/dev/null 2>&1 && return
        sleep 0.2
    done
    echo "accounts.sh: $what does not answer after 30 s; look at $R/log" >&2
    exit 1
}
wait_for mariadbd test -S "$MYSQL_UNIX_PORT"

cat >"$R/etc/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$R/run/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$PORT
CommunicationParameters=NoInAddrAny
SlurmUser=root
PidFile=$R/run/slurmdbd.pid
LogFile=$R/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
CONF
chmod 600 "$R/etc/slurmdbd.conf"
cat >>"$SLURM_CONF" <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$PORT
AccountingStoragePass=$R/run/munge.socket
AccountingStorageEnforce=associations
CONF
slurmdbd
wait_for slurmdbd sacctmgr --noheader show cluster
sacctmgr --immediate --quiet add cluster test >/dev/null
sacctmgr --immediate --quiet add account research Cluster=test >/dev/null
sacctmgr --immediate --quiet add user root Account=research >/dev/null
