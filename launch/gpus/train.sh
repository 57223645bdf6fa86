#!/bin/bash
# One run on all GPUs of this machine, by one process:
#   bash launch/gpus/train.sh --gin_file=configs/runs/books.gin --workdir=runs/books
# It goes on by itself where it is told to stop (exit code 75), as spot machines are.
# DRY_RUN=1 prints what it would run.

# Say here what the run needs.
GPUS="${GPUS:-}" # such as 0,1,2,3; empty: all
MESH="${MESH:-Mesh.data = -1}"

run() { if [ -n "${DRY_RUN:-}" ]; then echo "$*"; else "$@"; fi; }

if [ -n "$GPUS" ]; then
  export CUDA_VISIBLE_DEVICES="$GPUS"
fi
run "${PYTHON:-python}" -m brt.train --gin_bindings="$MESH" "$@"
