#!/bin/bash
# What the cluster tests run on, from Debian: only what is missing is installed. Needs root.
set -euo pipefail

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
