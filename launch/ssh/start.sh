#!/bin/bash
# All hosts of a file over ssh: ./start.sh HOSTFILE [arguments of dist-train train]
# A line of HOSTFILE is `[user@]host slots=8`. Every host needs the same folder (a shared file system), the same Python at the
# same path, and must let `ssh HOST true` in without a question. Any stop signal to this process saves on all hosts (75).
set -euo pipefail
if (($# < 1)); then
  echo "usage: $0 HOSTFILE [arguments of dist-train train]" >&2
  exit 2
fi
hostfile=$1
shift
exec dist-train train launch.kind=ssh "launch.hostfile=$hostfile" "$@"
