#!/usr/bin/env bash
# A cluster of Debian's Slurm on 127.0.0.1, two nodes, and a sweep on it that is preempted, requeued, cancelled, drained and
# over its time; compared with a local sweep. As root; it stops its daemons and removes its files. Half an hour on two
# cores that six other programs wanted as well.
#
#   bash tests/slurm/run.sh             # ends with a message where the packages are missing
#   bash tests/slurm/run.sh --install   # apt-get install slurm-wlm munge before
#   bash tests/slurm/run.sh --only limit
#
# One line "ok" or "not ok" for each thing shown; the status is the number of "not ok".
set -uo pipefail
cd "$(dirname "$0")/../.."

if ((EUID)); then
  echo "run.sh: Slurm's daemons are started as root; nothing was run" >&2 && exit 77
fi
if [[ ${1-} == --install ]]; then
  shift
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge >/dev/null || exit 77
fi
for program in munged slurmctld slurmd sbatch; do
  if ! command -v "$program" >/dev/null; then
    echo "run.sh: $program is missing: apt-get install slurm-wlm munge, or --install; nothing was run" >&2 && exit 77
  fi
done
export OMP_NUM_THREADS=1 GOMP_SPINCOUNT=1000 PYTHONPATH=$PWD
exec python -m tests.slurm.scenarios "$@"
