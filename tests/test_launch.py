"""Lints the scripts in launch/ and runs them as far as possible without a cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.rglob("*.sh"))


def dry(script: str, *flags: str, **variables: str) -> str:
    """Returns the commands that a script prints with DRY_RUN=1."""
    done = subprocess.run(
        ["bash", str(LAUNCH / script), *flags], capture_output=True, text=True,
        env=os.environ | {"DRY_RUN": "1", "SLURM_JOB_ID": "7"} | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_have_no_traps(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_run_on_nodes_is_one_process_a_node() -> None:
    out = dry("slurm/train_nodes.sh", "--workdir=runs/a", PYTHON="python3")
    assert out == (
        "srun --kill-on-bad-exit=1 python3 -m brt.train --distributed "
        "--gin_bindings=Mesh.data = -1 --workdir=runs/a\n"
    )


def test_a_run_on_gpus_takes_all_of_them() -> None:
    out = dry("gpus/train.sh", "--workdir=runs/a", PYTHON="python3")
    assert out == "python3 -m brt.train --gin_bindings=Mesh.data = -1 --workdir=runs/a\n"


def test_a_slice_from_nothing_to_bits() -> None:
    settings = {"PROJECT": "p", "ZONE": "z", "NAME": "n", "WORKDIR": "/s/a b"}
    place = "--project=p --zone=z\n"
    created = dry("tpu_pod/pod.sh", "create", **settings, SPOT="--spot")
    assert created.startswith("gcloud compute tpus queued-resources create n --node-id=n ")
    assert "--spot " in created and created.endswith(place)
    assert "pip install --upgrade  brt 'jax[tpu]'" in dry("tpu_pod/pod.sh", "install", **settings)
    trained = dry(
        "tpu_pod/pod.sh", "train", "--gin_file=a.gin", "--gin_bindings=A.b = 1", **settings
    )
    assert "tpu-vm ssh n --worker=all --command=python3 -m brt.train --distributed " in trained
    assert r"--workdir=/s/a\ b" in trained and r"--gin_bindings=A.b\ =\ 1" in trained
    evaluated = dry("tpu_pod/pod.sh", "evaluate", "--split=test", **settings)
    assert r"-m brt.evaluate --distributed --workdir=/s/a\ b --split=test" in evaluated
    deleted = dry("tpu_pod/pod.sh", "delete", **settings)
    assert deleted == f"gcloud compute tpus queued-resources delete n --force --quiet {place}"
    asked = subprocess.run(["bash", LAUNCH / "tpu_pod/pod.sh"], capture_output=True, text=True)
    assert asked.returncode == 2 and "pod.sh train" in asked.stdout


def test_processes_on_this_machine_are_told_of_each_other() -> None:
    done = subprocess.run(
        [sys.executable, str(LAUNCH / "local/run_processes.py"), "--processes=2", "--port=99",
         "--devices_per_process=4", "--dry_run", "--", "brt", "train", "--workdir=a b"],
        capture_output=True, text=True, check=True, env=os.environ | {"XLA_FLAGS": ""},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["--process_index=0", "--process_index=1"]
    for line in lines:
        assert "JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 brt" in line
        assert "'--workdir=a b' --coordinator_address=localhost:99 --process_count=2" in line


def test_the_jobset_is_one() -> None:
    pytest.importorskip("yamllint")
    path = LAUNCH / "gke/jobset.yaml"
    rules = json.dumps({"extends": "default", "rules": {"document-start": "disable"}})
    linted = subprocess.run(
        [sys.executable, "-m", "yamllint", "-d", rules, str(path)], capture_output=True, text=True
    )
    assert linted.returncode == 0, linted.stdout
    found: Any = yaml.safe_load(path.read_text())
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert found["metadata"]["name"] and found["spec"]["failurePolicy"].keys() == {"maxRestarts"}
    (replicated,) = found["spec"]["replicatedJobs"]
    assert replicated.keys() == {"name", "replicas", "template"}
    job = replicated["template"]["spec"]
    assert job["parallelism"] == job["completions"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "brt.train", "--distributed"]


@pytest.mark.slow_cases("*-[01]")
@pytest.mark.parametrize("code", [0, 1, 75])
@pytest.mark.parametrize(
    ("script", "started", "job"),
    [
        ("train.sh", "-m brt.train --gin_file=a b.gin\n", "17"),
        ("sweep.sh", "-m brt.sweep --gin_file=a b.gin --array_index=2\n", "17_2"),
    ],
    ids=["train", "sweep"],
)
def test_a_job_of_slurm_passes_the_signal_on_and_queues_itself_again(
    script: str, started: str, job: str, code: int, tmp_path: Path
) -> None:
    python = (
        f'echo "$@" > started; trap "sleep 0.2; exit {code}" TERM; sleep 0.1; kill -TERM "$PPID"; '
        "for i in {1..100}; do sleep 0.05; done; exit 9"
    )
    for name, body in (("scontrol", 'echo "$@" > requeued'), ("python", python)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17",
        "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2",
    }  # fmt: skip
    words = ["bash", str(LAUNCH / "slurm" / script), "--gin_file=a b.gin"]
    assert subprocess.run(words, env=environment, cwd=tmp_path).returncode == code
    assert (tmp_path / "started").read_text() == started
    assert (tmp_path / "requeued").exists() == (code == 75)
    if code == 75:
        assert (tmp_path / "requeued").read_text() == f"requeue {job}\n"
