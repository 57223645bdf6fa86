#!/bin/bash
# Trains on one node. Copy this file, set the resources below, and submit it from an environment in
# which Python finds brt:
#   sbatch train.sh --gin_file=configs/runs/books.gin --workdir=runs/books \
#     --gin_bindings="Data.train = 'books'"

#SBATCH --job-name=train
#SBATCH --output=train-%j.txt
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --time=24:00:00
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --gres=gpu:1

# The job gets SIGTERM two minutes before its time limit. It saves a checkpoint, ends with exit code
# 75 and is queued again; then it continues from the checkpoint.
stopped=
trap 'stopped=yes; kill -TERM "$child"' TERM
"${PYTHON:-python}" -m brt.train "$@" &
child=$!
wait "$child"
code=$?
while [ -n "$stopped" ]; do # The signal has ended only `wait`; the child is still running.
  stopped=
  wait "$child"
  code=$?
done
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
