"""Tests checks before processes connect, the detection of a lost process, and that all processes
carry out a request to one of them at the same step.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import pytest

from brt.distributed import processes
from brt.distributed.processes import Heartbeat, Launch
from brt.errors import ConfigError, PeerError


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch("host:1"), "go together"),
        (Launch("host:1", 2), "go together"),
        (Launch("host:1", 2, 2), "--process_index=2 must be one of 0 to 1 "),
        (Launch("host", 2, 0), "--coordinator_address=host must be HOST:PORT"),
        (Launch("host:x", 2, 0), "must be HOST:PORT"),
        (Launch("localhost:99", 4, 1), "only from its own host, but this job has 4 hosts"),
        (Launch("127.0.0.1:99", 4, 1), "only from its own host, but this job has 4 hosts"),
        (Launch("[::1]:99", 4, 1), "only from its own host, but this job has 4 hosts"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    launch: Launch, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "4")
    with pytest.raises(ConfigError, match=message):
        processes.start(launch)


@pytest.mark.parametrize(
    ("launch", "variables"),
    [
        (Launch(distributed=True), {}),
        (Launch(distributed=True), {"JAX_COORDINATOR_ADDRESS": "localhost:1"}),
        (Launch(distributed=True), {"OMPI_MCA_orte_hnp_uri": "12;tcp://127.0.0.1:99"}),
        (Launch(distributed=True), {"OMPI_MCA_orte_hnp_uri": "unreadable"}),
        (Launch(distributed=True), {"KUBERNETES_SERVICE_HOST": "127.0.0.1"}),
        (Launch(), {"SLURM_STEP_NUM_TASKS": "2"}),
    ],
)
def test_an_environment_that_names_no_processes_is_wrong_usage(
    launch: Launch, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        processes.start(launch)
    for remedy in ("--coordinator_address", "--process_count", "SLURM_PROCID", "OMPI_COMM"):
        assert remedy in str(caught.value)
    assert "300 s" not in str(caught.value)


def test_a_failed_connection_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    class ConfigException(Exception):
        """An error such as the kubernetes package raises."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    error: Exception = ConfigException("no service account")
    with pytest.raises(ConfigError, match=r"--coordinator_address.*no service account"):
        processes.start(Launch(distributed=True))
    error = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nobody answers")
    with pytest.raises(PeerError, match=r"process 1 of 2 did not .* within 0 s.*nobody answers"):
        processes.start(Launch("host:1", 2, 1))


def test_a_process_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    processes.start(Launch())
    assert not processes.several() and processes.is_first()
    assert processes.gather("a", "text") == ["text"]
    assert processes.from_first([1, None]) == [1, None]
    processes.wait_for_all("b")
    processes.check_same({"config": "x"})
    with pytest.raises(KeyError), processes.explain_peer_errors():
        raise KeyError("bugs stay what they are")


def test_another_fact_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [{"config": "a = 1\nb = 2", "code": "1"}, {"config": "a = 1\nb = 3", "code": "1"}]
    monkeypatch.setattr(processes, "gather", lambda *_: [json.dumps(one) for one in facts])
    message = "process 1 of 1 has a different config than process 0: 'b = 3', not 'b = 2'; start"
    with pytest.raises(ConfigError, match=message):
        processes.check_same(facts[0])


class Service:
    """An in-process replacement of the key-value service of jax.distributed, for threads."""

    def __init__(self) -> None:
        self.texts = {"brt/alive/1": "1"}

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        time.sleep(0.01)
        if key not in self.texts:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.texts[key]

    def key_value_set(self, key: str, value: str, overwrite: bool = False) -> None:
        self.texts[key] = value

    def key_value_dir_get(self, place: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.texts.items() if key.startswith(f"{place}/")]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the list of codes with which a heartbeat tried to end the process; shortens all its
    intervals.
    """
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        threading.Event().wait()  # `os._exit` would end the calling thread, so block it.

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(processes, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(processes, "HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.05)
    return codes


def _waited(condition: Any) -> None:
    """Waits until a condition holds, for at most 10 seconds."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def named(index: int) -> str:
    return f"process {index} of 2"


@pytest.mark.parametrize("goodbye", ["", "DataError: no file"])
def test_who_is_silent_or_said_goodbye_is_named(
    goodbye: str, ended: list[int], capfd: pytest.CaptureFixture
) -> None:
    service = Service()
    if goodbye:
        service.texts["brt/stopped/1"] = goodbye
    Heartbeat(service, 0, 2, named)
    _waited(lambda: ended)
    assert ended == [PeerError.exit_code] == [75]
    said = f"has stopped: {goodbye}; start all" if goodbye else "has given no sign of life"
    assert f"process 1 of 2 {said}" in capfd.readouterr().err
    assert int(service.texts["brt/alive/0"]) > 1, "beats go on"


def test_a_first_process_that_stands_still_is_named_though_it_answers_nothing(
    ended: list[int], capfd: pytest.CaptureFixture
) -> None:
    service = Service()
    service.texts["brt/alive/0"] = "1 saving after step 6"
    answered = service.key_value_dir_get

    def answers_once(place: str) -> list[tuple[str, str]]:
        if place == "brt/stopped":
            threading.Event().wait()
        return answered(place)

    service.key_value_dir_get = answers_once
    Heartbeat(service, 1, 2, named)
    _waited(lambda: ended)
    assert ended == [75]
    assert "process 0 of 2 has given no sign of life for 0 s" in capfd.readouterr().err


def test_what_others_did_last_is_known(
    ended: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    service = Service()
    service.texts["brt/alive/1"] = "4 evaluating after step 12"
    beats = Heartbeat(service, 0, 2, named)
    beats.doing = lambda: "stepping after step 12"
    _waited(beats.last_activities)
    assert beats.last_activities() == ["process 1 of 2 was evaluating after step 12"]
    _waited(lambda: service.texts["brt/alive/0"].endswith(" stepping after step 12"))
    _waited(lambda: ended)
    assert "no sign of life for 0 s, last while evaluating after step 12" in capfd.readouterr().err


def test_no_beat_is_within_the_service_when_python_ends(ended: list[int]) -> None:
    within = threading.Event()

    class Slow(Service):
        def key_value_dir_get(self, place: str) -> list[tuple[str, str]]:
            within.set()
            time.sleep(0.1)
            return super().key_value_dir_get(place)

    before = set(threading.enumerate())
    beats = Heartbeat(Slow(), 0, 2, str)
    within.wait(10)
    beats.close()
    assert set(threading.enumerate()) <= before
    time.sleep(0.35)  # is more than HEARTBEAT_SECONDS
    assert not ended, "nobody is missed after the end"


class Gather:
    """A collective call that gives each of two threads the texts of both."""

    def __init__(self) -> None:
        self.barrier, self.said = threading.Barrier(2), []

    def __call__(self, name: str, text: str) -> list[str]:
        if self.barrier.wait(10) == 0:
            self.said = []
        self.barrier.wait(10)
        self.said.append(text)
        self.barrier.wait(10)
        found = list(self.said)
        self.barrier.wait(10)
        return found


def test_all_do_it_at_the_same_look_as_often_as_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service()
    monkeypatch.setattr(processes, "service", lambda: service)
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "gather", Gather())
    files: set[str] = {"checkpoint_now"}
    first: Callable[[], str | None] = lambda: "a file" if files else None  # noqa: E731
    heard: list[str] = []
    both = [
        processes.AgreedRequest("checkpoint", asked, heard.append)
        for asked in (first, lambda: None)
    ]
    done: list[list[int]] = [[], []]

    def work(index: int) -> None:
        look = 0
        while len(done[index]) < 3:
            time.sleep(0.001 * (1 + 3 * index))  # The second process is slower.
            if both[index].reason_if_due():
                done[index].append(look)
                if index == 0:
                    files.clear()
                both[index].done()
                if index == 0 and len(done[0]) < 3:
                    threading.Timer(0.05, files.add, ["checkpoint_now"]).start()
            look += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for process in both:
        process.close()
    assert done[0] == done[1] and len(done[0]) == 3
    assert heard == ["a file to process 0 of 1"] * 3, "one hears of it, the other was asked"


def test_who_asks_when_another_one_is_gone_hears_it_at_the_next_look_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alone(name: str, text: str) -> list[str]:
        raise PeerError("the run's coordinator is gone")

    service = Service()
    monkeypatch.setattr(processes, "service", lambda: service)
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "gather", alone)
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    process = processes.AgreedRequest("stop", lambda: "SIGTERM", lambda reason: None)
    with pytest.raises(PeerError, match="coordinator is gone"):
        while process.reason_if_due() is None:
            time.sleep(0.01)
    process.close()
    assert not failures, "no traceback of a thread"


def test_no_thread_is_within_the_service_when_python_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    service, within = Service(), threading.Event()

    def slow(key: str, milliseconds: int) -> str:
        within.set()
        time.sleep(milliseconds / 1000)
        raise RuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(service, "blocking_key_value_get", slow)
    monkeypatch.setattr(processes, "service", lambda: service)
    monkeypatch.setattr(processes, "several", lambda: True)
    process = processes.AgreedRequest("end", lambda: None, lambda reason: None)
    within.wait(10)
    process.close()
    assert "agreement: end" not in [thread.name for thread in threading.enumerate()]
