#!/usr/bin/env bash
# Two machines of accelerate's launcher on 127.0.0.1 (gloo, CPU): one is killed, the other ends with one line, both resume.
# Eleven minutes on two cores that six other programs wanted as well.
#
#   bash tests/machines/run.sh
#
# One line "ok" or "not ok" for each thing shown; the status is the number of "not ok".
set -uo pipefail
cd "$(dirname "$0")/../.."
export GOMP_SPINCOUNT=1000 PYTHONPATH=$PWD
exec python -m tests.machines.two_machines
