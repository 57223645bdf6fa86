"""Tests that all processes carry out a request to one process at the same step."""

import threading
import time
from collections.abc import Callable

import pytest

from brt.distributed import processes
from brt.errors import PeerError


class Service:
    """A key-value service like that of jax.distributed, for threads instead of processes."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        self.texts[key] = value

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        time.sleep(0.01)
        if key not in self.texts:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.texts[key]


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
    process = processes.AgreedRequest("end", lambda: None, lambda reason: None)
    within.wait(10)
    process.close()
    assert "agreement: end" not in [thread.name for thread in threading.enumerate()]
