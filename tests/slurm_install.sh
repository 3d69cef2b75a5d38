#!/usr/bin/env bash
# Installs what tests/slurm needs: Debian's Slurm 22.05 and munge (13 MB); with --accounts also slurmdbd and MariaDB's
# server (8 MB), for the tests of accounts. Without root, or on another system, it says so and ends well: the tests then
# skip with the same reason. Says how long it took.
set -euo pipefail
programs=(slurmctld slurmd munged) packages=(slurmctld slurmd slurm-client munge)
case "${1:-}" in
    '') ;;
    --accounts) programs+=(slurmdbd mariadbd) packages+=(slurmdbd mariadb-server-core) ;;
    *)
        echo "slurm_install.sh: got '$1'; allowed: --accounts, or nothing" >&2
        exit 2
        ;;
esac
if [ "$(command -v "${programs[@]}" | wc -l)" = "${#programs[@]}" ]; then
    echo "slurm: installed already ($(slurmctld -V))"
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "slurm: needs root and apt-get; tests/slurm will be skipped"
    exit 0
fi
SECONDS=0
apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
    "${packages[@]}" >/dev/null || {
    echo "slurm: the packages could not be installed; tests/slurm will be skipped"
    exit 0
}
echo "slurm: $(slurmctld -V) installed in $SECONDS s"
