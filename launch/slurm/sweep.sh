#!/bin/bash
# Runs a sweep as a job array with one task for each point. Copy this file, set the resources of a
# task below, and submit it from an environment in which Python finds brt:
#   sbatch --array=0-13 sweep.sh --gin_file=configs/sweeps/gates.gin --workdir=runs/gates

#SBATCH --job-name=sweep
#SBATCH --output=sweep-%A-%a.txt
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --time=24:00:00
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --gres=gpu:1

# A task gets SIGTERM two minutes before its time limit. It saves a checkpoint, ends with exit code
# 75 and is queued again; then it continues from the checkpoint.
stopped=
trap 'stopped=yes; kill -TERM "$child"' TERM
"${PYTHON:-python}" -m brt.sweep "$@" --array_index="$SLURM_ARRAY_TASK_ID" &
child=$!
wait "$child"
code=$?
while [ -n "$stopped" ]; do # The signal has ended only `wait`; the child is still running.
  stopped=
  wait "$child"
  code=$?
done
if [ "$code" -eq 75 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
