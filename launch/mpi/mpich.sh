#!/bin/bash
# One rank per slot over the hosts of a file, with MPICH or Intel MPI: ./mpich.sh HOSTFILE RANKS [arguments of dist-train train]
# A line of HOSTFILE is `host:8`. Several hosts need mpi4py on each, or MASTER_ADDR set to the first host.
# A signal to mpiexec (USR1, TERM, Ctrl-C) saves and stops (75).
set -euo pipefail
if (($# < 2)); then
  echo "usage: $0 HOSTFILE RANKS [arguments of dist-train train]" >&2
  exit 2
fi
hostfile=$1 ranks=$2
shift 2
# (The environment of this shell reaches all ranks.)
exec mpiexec -f "$hostfile" -n "$ranks" -wdir "$PWD" "$(command -v dist-train)" train "$@"
