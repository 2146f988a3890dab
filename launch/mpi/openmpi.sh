#!/bin/bash
# One rank per slot over the hosts of a file, with Open MPI: ./openmpi.sh HOSTFILE RANKS [arguments of dist-train train]
# A line of HOSTFILE is `host slots=8`. Several hosts need mpi4py on each, or MASTER_ADDR set to the first host.
# `kill -USR1` to mpirun saves and stops (75); its own answer to TERM and Ctrl-C leaves ranks no time to save.
set -euo pipefail
if (($# < 2)); then
  echo "usage: $0 HOSTFILE RANKS [arguments of dist-train train]" >&2
  exit 2
fi
hostfile=$1 ranks=$2
shift 2

forward=() # to other hosts Open MPI hands on only what it is told to
while read -r name; do
  case $name in MASTER_* | PYTHONPATH | OMP_NUM_THREADS | NCCL_* | GLOO_* | TORCH_* | HF_*) forward+=(-x "$name") ;; esac
done < <(compgen -e)

# Without --bind-to none every rank would be bound to one core.
exec mpirun --quiet --hostfile "$hostfile" -n "$ranks" --bind-to none --wdir "$PWD" "${forward[@]}" \
  "$(command -v dist-train)" train "$@"
