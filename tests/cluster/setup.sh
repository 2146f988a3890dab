#!/bin/bash
# What the cluster tests run on, from Debian: only what is missing is installed. Needs root.
set -euo pipefail

if ((EUID != 0)); then
  echo "tests/cluster: hosts are network namespaces and need root; run it as root, in a container or a machine of its own" >&2
  exit 2
fi
missing=()
need() { command -v "$1" >/dev/null || missing+=("${@:2}"); } # need PROGRAM PACKAGE...
need ip iproute2
need unshare util-linux
need slurmctld slurm-wlm munge
need mpirun openmpi-bin
need sshd openssh-server
need ssh openssh-client
need podman podman buildah debootstrap runc
if ((${#missing[@]})); then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q
  apt-get install -y -q --no-install-recommends "${missing[@]}"
fi
