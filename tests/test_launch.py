"""Lints the scripts in launch/ and runs them as far as possible without a cluster."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from brt.errors import PeerError, Preempted

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
        r"--gin_bindings=Mesh.data\ =\ -1 --workdir=runs/a "
        "\n"
    )


def test_a_run_on_gpus_takes_all_of_them() -> None:
    out = dry("gpus/train.sh", "--workdir=runs/a", PYTHON="python3")
    words = ["python3", "-m", "brt.train", "--gin_bindings=Mesh.data = -1", "--workdir=runs/a"]
    assert shlex.split(out) == words


SLICE = {
    "PROJECT": "p", "ZONE": "z", "NAME": "n", "WORKDIR": "gs://b/a b",
    "PACKAGE": "https://h/brt-1-py3-none-any.whl",
}  # fmt: skip
PLACE = "--project=p --zone=z\n"
SSH = "gcloud compute tpus queued-resources ssh n --node=all --worker=all --batch-size=all "


def commands(printed: str) -> list[str]:
    """Returns what a shell that gets these lines would run on the hosts."""
    script = f'gcloud() {{ for word in "$@"; do printf "%s\\0" "$word"; done; }}\n{printed}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")
    return [word.removeprefix("--command=") for word in words if word.startswith("--command=")]


def installs(package: str) -> list[str]:
    """Returns the lines that `pod.sh install` prints, the last one as it runs on the hosts."""
    out = dry("tpu_pod/pod.sh", "install", **SLICE | {"PACKAGE": package})
    return [*out.splitlines()[:-1], *commands(out)]


def test_a_wheel_gets_to_the_hosts(tmp_path: Path) -> None:
    wheel = tmp_path / "brt-1-py3-none-any.whl"
    for package in ("", str(wheel)):
        refused = subprocess.run(
            ["bash", LAUNCH / "tpu_pod/pod.sh", "install"],
            env=os.environ | SLICE | {"PACKAGE": package}, capture_output=True, text=True,
        )  # fmt: skip
        assert refused.returncode == 2 and "`make wheel`" in refused.stderr
    wheel.touch()
    copied, installed = installs(str(wheel))
    assert copied == (
        f"gcloud compute tpus queued-resources scp {wheel} n: --node=all --worker=all "
        f"--batch-size=all {PLACE.strip()}"
    )
    assert f"brt-env/bin/python ./{wheel.name} 'jax[tpu]'" in installed
    (installed,) = installs(f"gs://b/{wheel.name}")
    assert installed.startswith(f"gcloud storage cp gs://b/{wheel.name} . && ")
    assert f"brt-env/bin/python ./{wheel.name} 'jax[tpu]'" in installed


def test_a_slice_from_nothing_to_bits() -> None:
    created = dry("tpu_pod/pod.sh", "create", **SLICE, SPOT="--spot")
    assert created.startswith("gcloud compute tpus queued-resources create n --node-id=n ")
    assert "--spot " in created and created.endswith(PLACE)
    assert installs(SLICE["PACKAGE"])[-1].endswith(
        f"brt-env/bin/python {SLICE['PACKAGE']} 'jax[tpu]'"
    )
    flags = "--gin_file=a.gin", "--gin_bindings=A.b = 1"
    trained = dry("tpu_pod/pod.sh", "train", *flags, **SLICE)
    assert trained.startswith(SSH)
    assert commands(trained)[0].startswith("keep_training ()")
    flags = r"--workdir=gs://b/a\ b --gin_bindings=Mesh.data\ =\ -1 --gin_file=a.gin"
    assert rf"follow --distributed {flags} --gin_bindings=A.b\ =\ 1" in commands(trained)[0]
    fsdp = dry("tpu_pod/pod.sh", "train", **SLICE, MESH="Mesh.fsdp = -1")
    assert r"=Mesh.fsdp\ =\ -1" in commands(fsdp)[0] and "Mesh.data" not in fsdp
    evaluated = dry("tpu_pod/pod.sh", "evaluate", "--split=test", **SLICE)
    (command,) = commands(evaluated)
    assert command.endswith(r"brt evaluate --distributed --workdir=gs://b/a\ b --split=test")
    deleted = dry("tpu_pod/pod.sh", "delete", **SLICE)
    assert deleted == f"gcloud compute tpus queued-resources delete n --force --quiet {PLACE}"
    asked = subprocess.run(["bash", LAUNCH / "tpu_pod/pod.sh"], capture_output=True, text=True)
    assert asked.returncode == 2 and "pod.sh train" in asked.stdout


def test_several_slices_are_one_request() -> None:
    created = dry("tpu_pod/pod.sh", "create", **SLICE, SLICES="2")
    assert " create n --node-count=2 --node-prefix=n --accelerator-type=" in created
    assert "--node-id" not in created


def test_what_follows_a_preemption_is_shown() -> None:
    trained = dry("tpu_pod/pod.sh", "train", **SLICE)
    again = trained.partition("# if the slices were preempted")[2].splitlines()[1:]
    commands = [line.removeprefix("gcloud compute tpus queued-resources ")[:6] for line in again]
    assert commands == ["delete", "create", "ssh n "]


# Stands for gcloud: every host is a directory, in which commands run. The state of the slice is in
# a file, and its name and action are written to a list.
GCLOUD = """#!/bin/bash
here=$(dirname "$0")
echo "$3 $4" >>"$here/asked"
case "$3 $4" in
*describe) cat "$here/state" ;;
*create) echo ACTIVE >"$here/state" ;;
*ssh)
  for word in "$@"; do case "$word" in --command=*) command="${word#--command=}" ;; esac; done
  cd "$here/host" && bash -c "$command" ;;
esac
"""
BRT = """#!/bin/bash
echo "$@" >>"$(dirname "$0")/started"
codes="$(dirname "$0")/codes"
code=$(head -n 1 "$codes")
sed -i 1d "$codes"
case "$code" in SUSPENDED | DELETING) echo "$code" >"$(dirname "$0")/../../../state"; exit 1 ;; esac
if [ "$code" = wait ]; then trap 'exit 75' TERM; for i in {1..200}; do sleep 0.1; done; fi
echo "ended with $code"
exit "$code"
"""


def pretended(tmp_path: Path, codes: str) -> dict[str, str]:
    """Returns the environment in which `pod.sh` finds a slice whose trainer ends with the codes."""
    programs = {
        "gcloud": GCLOUD,
        "host/brt-env/bin/brt": BRT,
        "sleep": '#!/bin/bash\n[ "$1" != 0.1 ] || /bin/sleep 0.1\n',  # Only BRT waits.
        "tail": f'#!/bin/bash\nexec {shutil.which("tail")} --sleep-interval=0.02 "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "host/brt-env/bin/codes").write_text("\n".join(codes.split()) + "\n")
    (tmp_path / "state").write_text("ACTIVE\n")
    return os.environ | SLICE | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def trained(tmp_path: Path, codes: str) -> tuple[int, int, list[str]]:
    """Returns the exit code of `pod.sh train`, the number of attempts, and what it did."""
    done = subprocess.run(
        ["bash", LAUNCH / "tpu_pod/pod.sh", "train", "--gin_bindings=A.b = 1"],
        env=pretended(tmp_path, codes), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    attempts = (tmp_path / "host/brt-env/bin/started").read_text().splitlines()
    assert set(attempts) == {
        "train --distributed --workdir=gs://b/a b --gin_bindings=Mesh.data = -1 "
        "--gin_bindings=A.b = 1"
    }
    asked = [line.split()[-1] for line in (tmp_path / "asked").read_text().splitlines()]
    return done.returncode, len(attempts), [word for word in asked if word != "describe"]


@pytest.mark.parametrize(
    ("codes", "code", "attempts"),
    [
        ("0", 0, 1),
        ("75 134 0", 0, 3),
        ("4 2", 2, 2),
        ("70", 70, 1),
        ("75 75 137 0", 137, 3),
        ("DELETING", 1, 1),
    ],
)
def test_hosts_train_again_where_that_helps(
    tmp_path: Path, codes: str, code: int, attempts: int
) -> None:
    # If the hosts say that all went well, they are asked once more, because gcloud says so, too, if
    # it has reached none.
    assert trained(tmp_path, codes) == (code, attempts, ["ssh"] * (1 if code else 2))


def test_a_slice_that_was_preempted_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text("#!/bin/bash\n")  # what installs
    (tmp_path / "python3").chmod(0o755)
    assert trained(tmp_path, "SUSPENDED 0") == (
        0, 2, ["ssh", "delete", "create", *["ssh"] * 3],
    )  # fmt: skip


@pytest.mark.slow
def test_training_outlives_the_terminal_and_stops_when_asked(tmp_path: Path) -> None:
    environment = pretended(tmp_path, "wait 0")
    words = ["bash", str(LAUNCH / "tpu_pod/pod.sh")]

    def start(*flags: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*words, "train", *flags], env=environment, start_new_session=True,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    first = start()
    started = tmp_path / "host/brt-env/bin/started"
    wait_for(started.exists)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second = start("--gin_bindings=A.b = 1")
    wait_for(lambda: (tmp_path / "asked").read_text().count("ssh") == 2)
    subprocess.run([*words, "stop"], env=environment, check=True)
    shown, _ = second.communicate(timeout=60)
    assert second.returncode == 75
    running = r"brt train --distributed --workdir=gs://b/a\ b --gin_bindings=Mesh.data\ =\ -1"
    assert f"pod.sh: other flags are ignored while this runs: {running}\n" in shown
    assert len(started.read_text().splitlines()) == 1


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


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


def linted(path: Path) -> Any:
    """Returns the content of a YAML file in which yamllint finds nothing."""
    pytest.importorskip("yamllint")
    rules = json.dumps({"extends": "default", "rules": {"document-start": "disable"}})
    done = subprocess.run(
        [sys.executable, "-m", "yamllint", "-d", rules, str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    return yaml.safe_load(path.read_text())


def test_the_jobset_is_one() -> None:
    found = linted(LAUNCH / "gke/jobset.yaml")
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    policy = found["spec"]["failurePolicy"]
    assert found["metadata"]["name"] and policy.keys() == {"maxRestarts", "rules"}
    (replicated,) = found["spec"]["replicatedJobs"]
    assert replicated.keys() == {"name", "replicas", "template"}
    job = replicated["template"]["spec"]
    assert job["parallelism"] == job["completions"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert not {4, PeerError.exit_code} & set(rule["onExitCodes"]["values"])
    pod = job["template"]["spec"]
    assert pod["serviceAccountName"] and "volumes" not in pod
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "brt.train", "--distributed"]
    assert any(word.startswith("--workdir=gs://") for word in container["args"])


def test_the_task_of_skypilot_is_one(tmp_path: Path) -> None:
    found = linted(LAUNCH / "skypilot/train.yaml")
    assert found.keys() == {"name", "workdir", "resources", "envs", "setup", "run"}
    recovery = found["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [Preempted.exit_code]
    assert found["envs"]["WORKDIR"].startswith("s3://")
    (tmp_path / "brt-env/bin").mkdir(parents=True)
    (tmp_path / "brt-env/bin/brt").symlink_to("/bin/echo")
    environment = os.environ | found["envs"] | {"HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", found["run"]], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "train --gin_bindings=Mesh.data = -1 --gin_bindings=Data.train = 's3://my-bucket/books' "
        "--workdir=s3://my-bucket/runs/brt --gin_file=configs/runs/books.gin "
        "--gin.Training.batch_size=32\n"
    )


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
