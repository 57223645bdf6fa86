#!/bin/bash
# Creates TPU slices, trains and evaluates on them, and deletes them. Set the variables below; then
#   bash pod.sh create     requests the slices and waits until they are active
#   bash pod.sh install    installs brt on all of their hosts
#   bash pod.sh train --gin_file=configs/base/paper.gin \
#     --gin_file=configs/models/rec_fixed_skip.gin \
#     --gin_bindings="Data.train = 'gs://my-bucket/books'"   trains, on all hosts
#   bash pod.sh stop       makes the training save a checkpoint and end
#   bash pod.sh evaluate --split=test
#   bash pod.sh delete     deletes the slices; the bucket keeps the run
# The training goes on if this terminal is closed or loses the connection; the same command then
# shows its output again. If spot slices are preempted while `train` runs, it deletes them, requests
# new ones, installs brt and trains again. DRY_RUN=1 prints the commands instead of running them.

PROJECT="${PROJECT:-my-project}"
ZONE="${ZONE:-us-central2-b}"
NAME="${NAME:-brt}"
TYPE="${TYPE:-v4-64}"                     # 32 chips; brt.plan says whether the run fits
SLICES="${SLICES:-1}"                     # their chips together divide Training.batch_size
RUNTIME="${RUNTIME:-tpu-ubuntu2204-base}" # the image of the hosts
WORKDIR="${WORKDIR:-gs://my-bucket/runs/$NAME}" # in a bucket in the region of the slices
PACKAGE="${PACKAGE:-}"                    # a wheel of brt (dist/brt-*.whl) or its URL; gs:// also
MESH="${MESH:-Mesh.data = -1}"            # or Mesh.fsdp = -1; further axes are flags of train
SPOT="${SPOT:-}"                          # --spot: cheaper, but may be preempted at any time
PAUSE="${PAUSE:-60}"                      # seconds, after which a preemption is visible

set -eu

quoted() { printf ' %q' "$@"; }

run() { if [ -n "${DRY_RUN:-}" ]; then quoted "$@" | sed '1s/^ //'; echo; else "$@"; fi; }

slice() { run gcloud compute tpus "$@" --project="$PROJECT" --zone="$ZONE"; }

on_all_hosts() { # at the same time, because each waits for all others
  slice queued-resources ssh "$NAME" --node=all --worker=all --batch-size=all --command="$1"
}

# The next two functions run on the hosts.

# Trains until the run is finished, was stopped, or needs a person. It trains again after exit codes
# 4 (the bucket did not answer), 75 (another process has ended), 134 (process 0 was killed) and 137
# (this process was killed), unless three attempts in a row took less than ten minutes.
# shellcheck disable=SC2329 # `follow` passes it on
keep_training() {
  local began code=0 early=0 stopped=
  trap 'stopped=yes' TERM
  while [ -z "$stopped" ] && [ "$early" -lt 3 ]; do
    began=$SECONDS code=0
    brt-env/bin/brt train "$@" || code=$?
    case "$code" in 4 | 75 | 134 | 137) ;; *) break ;; esac
    early=$((SECONDS - began < 600 ? early + 1 : 0))
    echo "pod.sh: training ended with exit code $code"
    sleep 10 || true
  done
  echo "$code" >brt-train.code
}

# Starts `keep_training`, unless it runs, and shows its output until it ends.
# shellcheck disable=SC2329 # sent to the hosts
follow() {
  local group
  group=$(cat brt-train.group 2>/dev/null || true)
  if [ -z "$group" ] || ! kill -0 -- "-$group" 2>/dev/null; then
    rm -f brt-train.code
    : >brt-train.txt
    setsid nohup bash -c "$(declare -f keep_training); keep_training \"\$@\"" bash "$@" \
      >>brt-train.txt 2>&1 </dev/null &
    group=$!
    echo "$group" >brt-train.group
    printf ' %q' "$@" >brt-train.flags
  elif [ "$(printf ' %q' "$@")" != "$(cat brt-train.flags)" ]; then
    echo "pod.sh: other flags are ignored while this runs: brt train$(cat brt-train.flags)"
  fi
  tail --pid="$group" -n +1 -f brt-train.txt
  return "$(cat brt-train.code 2>/dev/null || echo 75)"
}

create() {
  local state nodes=(--node-id="$NAME")
  if [ "$SLICES" -gt 1 ]; then # The slices are called NAME-0, NAME-1, ...
    nodes=(--node-count="$SLICES" --node-prefix="$NAME")
  fi
  # shellcheck disable=SC2086 # no flag where SPOT is empty
  slice queued-resources create "$NAME" "${nodes[@]}" --accelerator-type="$TYPE" \
    --runtime-version="$RUNTIME" $SPOT
  until [ -n "${DRY_RUN:-}" ]; do
    state=$(state_of_request)
    case "$state" in
    ACTIVE) break ;;
    FAILED | SUSPENDED)
      echo "pod.sh: the request for $NAME is $state; run pod.sh delete first"
      return 1
      ;;
    esac
    echo "waiting for $NAME ($state); to give up: pod.sh delete"
    sleep 30
  done
}

state_of_request() {
  slice queued-resources describe "$NAME" --format='value(state.state)' || true
}

preempted() { # An answer that is missing, because the network fails, is no preemption.
  local state node number
  state=$(state_of_request)
  case "$state" in
  ACTIVE) ;;
  FAILED | SUSPEND*) return 0 ;;
  *) return 1 ;; # such as DELETING: somebody does not want them any more
  esac
  for ((number = 0; number < SLICES; number++)); do
    node="$NAME"
    if [ "$SLICES" -gt 1 ]; then node="$NAME-$number"; fi
    state=$(slice tpu-vm describe "$node" --format='value(state)' || true)
    if [ "$state" = PREEMPTED ]; then return 0; fi
  done
  return 1
}

need_package() {
  case "$PACKAGE" in
  *://*) return ;;
  *.whl) if [ -f "$PACKAGE" ]; then return; fi ;;
  ?*) return ;;
  esac
  echo "pod.sh: make a wheel with \`make wheel\` in brt's repository and set PACKAGE to the file" \
    "(dist/brt-*.whl), or copy it to a bucket or a server and set PACKAGE to its URL" >&2
  exit 2
}

install() { # uv provides a version of Python that brt supports.
  local package="$PACKAGE" fetch=
  case "$PACKAGE" in
  gs://*)
    package="./${PACKAGE##*/}"
    fetch="gcloud storage cp$(quoted "$PACKAGE") . && "
    ;;
  *)
    if [ -f "$PACKAGE" ]; then
      package="./${PACKAGE##*/}"
      slice queued-resources scp "$PACKAGE" "$NAME:" --node=all --worker=all --batch-size=all
    fi
    ;;
  esac
  on_all_hosts "${fetch}python3 -m pip install --user --upgrade uv && \
python3 -m uv venv --clear --python 3.12 brt-env && \
python3 -m uv pip install --python brt-env/bin/python$(quoted "$package") 'jax[tpu]'"
}

delete() { slice queued-resources delete "$NAME" --force --quiet; }

train() {
  local code command
  need_package # for new slices after a preemption
  command="$(declare -f keep_training follow)
follow --distributed$(quoted --workdir="$WORKDIR" --gin_bindings="$MESH" "$@")"
  while true; do
    code=0
    if [ -z "${DRY_RUN:-}" ] && preempted; then code=255; else on_all_hosts "$command" || code=$?; fi
    # gcloud exits with 0 also if it reaches no host.
    if [ "$code" -eq 0 ] && [ -z "$(on_all_hosts 'cat brt-train.code')" ]; then code=255; fi
    if [ -n "${DRY_RUN:-}" ]; then
      echo "# if the slices were preempted, and then again from the start:"
    elif [ "$code" -eq 0 ]; then
      return 0
    else
      sleep "$PAUSE"
      if ! preempted; then
        if [ "$code" -eq 255 ]; then continue; fi # The connection was lost.
        return "$code"
      fi
      echo "pod.sh: $NAME was preempted"
    fi
    delete
    create
    install
    if [ -n "${DRY_RUN:-}" ]; then return 0; fi
  done
}

action="${1:-help}"
shift || true
case "$action" in
create) create ;;
install)
  need_package
  install
  ;;
train) train "$@" ;;
stop) on_all_hosts "kill -TERM -- -\"\$(cat brt-train.group)\"" ;;
evaluate)
  on_all_hosts "brt-env/bin/brt evaluate --distributed$(quoted --workdir="$WORKDIR" "$@")"
  ;;
delete) delete ;;
*)
  grep '^#  ' "$0"
  exit 2
  ;;
esac
