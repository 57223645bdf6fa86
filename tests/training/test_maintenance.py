"""Tests that a run stops if a metadata server of Google Cloud announces the machine's end."""

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_settings import changed
from tiny_runs import tiny_config

import brt
from brt.checkpointing import reader
from brt.config import Checkpoint
from brt.errors import Preempted
from brt.training import maintenance
from brt.training.session import Session

EVENT, SPOT = "maintenance-event", "preempted"
TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"


class Metadata(http.server.ThreadingHTTPServer):
    """A metadata server, whose `answer` is a status (0 for none) and values by key.

    Both are one tuple, because a request may be answered while a test replaces them.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: tuple[int, dict[str, str]] = 200, {EVENT: "NONE", SPOT: "FALSE"}
        self.asked = 0

    def change(self, values: dict[str, str], status: int = 200) -> None:
        self.answer = status, self.answer[1] | values

    def wait(self, requests: int = 4) -> None:
        end, goal = time.monotonic() + 30, self.asked + requests
        while self.asked < goal:
            assert time.monotonic() < end
            time.sleep(0.005)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        place, _, key = self.path.rpartition("/")
        assert place == "/computeMetadata/v1/instance"
        assert self.headers["Metadata-Flavor"] == "Google"
        self.server.asked += 1
        status, values = self.server.answer
        if status:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(values[key].encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        monkeypatch.setattr(maintenance, "_EVERY_SECONDS", 0.01)
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("key", "value"), [(EVENT, TERMINATE), (SPOT, "TRUE")])
def test_an_event_stops_once(metadata: Metadata, key: str, value: str) -> None:
    reasons: list[str] = []
    with maintenance.watching(reasons.append):
        metadata.wait()
        assert reasons == []
        metadata.change({key: value})
        metadata.wait()
        assert reasons == [f"Google Cloud's {key}={value}"]
        metadata.wait()
    assert len(reasons) == 1


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({EVENT: "MIGRATE_ON_HOST_MAINTENANCE"}, 200), ({EVENT: TERMINATE, SPOT: "TRUE"}, 503),
        ({EVENT: TERMINATE, SPOT: "TRUE"}, 0), ({EVENT: "\x00" * 1000}, 200),
    ],
)  # fmt: skip
def test_other_answers_change_nothing(metadata: Metadata, values: dict, status: int) -> None:
    reasons: list[str] = []
    with maintenance.watching(reasons.append):
        metadata.wait()
        metadata.change(values, status)
        metadata.wait()
    assert reasons == []


def test_an_event_from_before_the_start_stops_nothing(metadata: Metadata) -> None:
    metadata.change({EVENT: TERMINATE})
    reasons: list[str] = []
    with maintenance.watching(reasons.append):
        metadata.wait()
        assert reasons == []
        metadata.change({EVENT: "NONE"})
        metadata.wait()
        metadata.change({EVENT: TERMINATE})
        metadata.wait()
    assert len(reasons) == 1, "but the next one does"


@pytest.mark.parametrize("host", ["127.0.0.1:1", "127.0.0.1:x"])
def test_a_server_that_is_missing_changes_nothing(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    monkeypatch.setattr(maintenance, "_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(maintenance, "_TIMEOUT", 0.1)
    reasons: list[str] = []
    with maintenance.watching(reasons.append):
        time.sleep(0.1)
        names = [thread.name for thread in threading.enumerate()]
        assert "maintenance" in names, "it tries again"
    assert reasons == []


def test_only_machines_of_google_cloud_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(maintenance, "_PRODUCT", tmp_path / "name")
    monkeypatch.setattr(maintenance, "_read", lambda key: asked.append(key) or "")
    for product, asks in ((None, False), ("Standard PC", False), ("Google Compute Engine", True)):
        asked: list[str] = []
        if product:
            (tmp_path / "name").write_text(f"{product}\n")
        with maintenance.watching(lambda reason: None):
            time.sleep(0.05)
        assert bool(asked) == asks


@pytest.mark.slow  # Quick tests show the notice, and what a run does that is to stop.
def test_a_run_saves_and_ends_with_exit_code_75(
    metadata: Metadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    step = Session.step

    def announced(self: Session) -> None:
        step(self)
        if self.completed == 2:
            metadata.change({EVENT: TERMINATE})
        if self.completed in (2, 4):
            metadata.wait()

    monkeypatch.setattr(Session, "step", announced)
    config = changed(tiny_config(tmp_path, steps=4), checkpoint=Checkpoint(every=0))
    with pytest.raises(Preempted, match="saved at step 2; run the same") as stopped:
        brt.train(config, tmp_path / "run")
    assert stopped.value.exit_code == 75
    assert reader.steps(tmp_path / "run/checkpoints") == [2]
    assert f"Google Cloud's {EVENT}={TERMINATE}: saving at the next" in capsys.readouterr().err
    assert brt.train(config, tmp_path / "run").step == 4, "on the same machine"
