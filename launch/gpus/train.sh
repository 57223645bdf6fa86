#!/bin/bash
# Trains on all GPUs of this machine with one process:
#   bash launch/gpus/train.sh --gin_file=configs/runs/books.gin --workdir=runs/books \
#     --gin_bindings="Data.train = 'books'"
# On SIGTERM, which spot machines send before they stop, the run saves a checkpoint and ends with
# exit code 75; the same command continues it.
# DRY_RUN=1 prints the command instead of running it.

# Set the GPUs and the mesh of the run here.
GPUS="${GPUS:-}" # such as 0,1,2,3; all GPUs if empty
MESH="${MESH:-Mesh.data = -1}"

run() { if [ -n "${DRY_RUN:-}" ]; then printf '%q ' "$@"; echo; else "$@"; fi; }

if [ -n "$GPUS" ]; then
  export CUDA_VISIBLE_DEVICES="$GPUS"
fi
run "${PYTHON:-python}" -m brt.train --gin_bindings="$MESH" "$@"
