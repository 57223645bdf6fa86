#!/bin/bash
# Trains on several nodes. Copy this file, set the resources below, and submit it:
#   sbatch train_nodes.sh --gin_file=configs/runs/books.gin --gin.Training.batch_size=32 \
#     --workdir=/shared/runs/a --gin_bindings="Data.train = '/shared/books'"
# DRY_RUN=1 bash train_nodes.sh ... prints the command instead of running it.

#SBATCH --job-name=train
#SBATCH --output=train-%j.txt
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
#SBATCH --time=24:00:00
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --gres=gpu:8

# Each node has one process, which uses all GPUs of the node. The processes find each other through
# SLURM's environment variables. Five minutes before the job's time limit, all of them stop at the
# same step.
run() { if [ -n "${DRY_RUN:-}" ]; then printf '%q ' "$@"; echo; else "$@"; fi; }

# Without this variable, JAX takes one GPU for each process.
JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((${SLURM_GPUS_ON_NODE:-8} - 1)))
export JAX_LOCAL_DEVICE_IDS

trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM # signals the job's processes, but not this script
run srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m brt.train --distributed \
  --gin_bindings='Mesh.data = -1' "$@" &
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # A signal ends only `wait`; the child is still running.
  wait "$child"
  code=$?
done
if [ "$code" -eq 75 ]; then
  run scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
