#!/bin/bash
# Creates a TPU slice, trains and evaluates on it, and deletes it. Set the variables below; then
#   bash pod.sh create     requests the slice and waits until it is active
#   bash pod.sh install    installs brt on all of its hosts
#   bash pod.sh train --gin_file=configs/base/paper.gin ...   trains, on all hosts
#   bash pod.sh evaluate --split=test
#   bash pod.sh delete     deletes the slice
# DRY_RUN=1 prints the commands instead of running them.

PROJECT="${PROJECT:-my-project}"
ZONE="${ZONE:-us-central2-b}"
NAME="${NAME:-brt}"
TYPE="${TYPE:-v4-64}"                       # 32 chips; brt.plan says whether the run fits
RUNTIME="${RUNTIME:-tpu-ubuntu2204-base}"
WORKDIR="${WORKDIR:-/mnt/shared/runs/$NAME}" # a file system that all hosts have mounted
PACKAGE="${PACKAGE:-brt}"                   # or the URL of a wheel
SPOT="${SPOT:-}"                            # --spot: cheaper, but may be stopped at any time

set -eu

run() { if [ -n "${DRY_RUN:-}" ]; then echo "$*"; else "$@"; fi; }

slice() { run gcloud compute tpus "$@" --project="$PROJECT" --zone="$ZONE"; }

on_all_hosts() { slice tpu-vm ssh "$NAME" --worker=all --command="$1"; }

quoted() { printf ' %q' "$@"; }

action="${1:-help}"
shift || true
case "$action" in
create)
  # shellcheck disable=SC2086 # no flag where SPOT is empty
  slice queued-resources create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" \
    --runtime-version="$RUNTIME" $SPOT
  until [ -n "${DRY_RUN:-}" ] || slice queued-resources describe "$NAME" \
    --format='value(state.state)' | grep -q ACTIVE; do
    echo "waiting for $NAME"
    sleep 30
  done
  ;;
install) on_all_hosts "pip install --upgrade $(quoted "$PACKAGE") 'jax[tpu]'" ;;
train)
  on_all_hosts "python3 -m brt.train --distributed --workdir=$(quoted "$WORKDIR" | cut -c2-) \
--gin_bindings='Mesh.data = -1'$(quoted "$@")"
  ;;
evaluate)
  on_all_hosts "python3 -m brt.evaluate --distributed --workdir=$(quoted "$WORKDIR" | cut -c2-)\
$(quoted "$@")"
  ;;
delete) slice queued-resources delete "$NAME" --force --quiet ;;
*)
  grep '^#  ' "$0"
  exit 2
  ;;
esac
