"""Tests metrics.jsonl, TensorBoard, the totals of metrics, and the speed of training."""

import json
import math
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from brt.errors import CheckpointError
from brt.training import workdir
from brt.training.metrics import MetricsWriter, read_metrics
from brt.training.progress import Throughput
from brt.training.step import MetricAccumulator, StepMetrics


@pytest.fixture
def run(tmp_path: Path) -> workdir.Workdir:
    return workdir.create(tmp_path)


def fail(message: str) -> None:
    raise AssertionError(message)


def lines(run: workdir.Workdir) -> list[dict[str, Any]]:
    return [untimed(json.loads(line)) for line in run.metrics.read_text().splitlines()]


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record of metrics without the time."""
    return {tag: value for tag, value in record.items() if tag != "perf/time"}


def write(run: workdir.Workdir, *steps: int, resume: int = 0) -> None:
    """Writes metrics of these steps as a run does that resumes at the step `resume`."""
    writer = MetricsWriter(run, resume, fail)
    for step in steps:
        writer.write(step, {"train/loss": step / 2})
    writer.close()


def test_one_line_a_step_however_many_calls(run: workdir.Workdir) -> None:
    writer, begun = MetricsWriter(run, 0, fail), time.time()
    writer.write(10, {"train/loss": np.float32(0.5), "data/epoch": 1})
    (first,) = read_metrics(run.metrics)
    assert begun - 1 <= first["perf/time"] <= time.time() + 1
    writer.write(10, {"eval/test/bits_per_byte": 2.0, "train/loss": 7})
    assert read_metrics(run.metrics)[0]["perf/time"] == first["perf/time"], "when it was begun"
    assert lines(run) == [
        {"step": 10, "train/loss": 7, "data/epoch": 1, "eval/test/bits_per_byte": 2.0}
    ], "and at once on disk"
    writer.write(20, {"train/loss": 0.25})
    assert [line["step"] for line in lines(run)] == [10, 20]
    with pytest.raises(ValueError, match="step 10 is written after step 20"):
        writer.write(10, {})
    writer.close()
    assert list(map(untimed, read_metrics(run.metrics))) == lines(run)


def test_a_restart_drops_what_was_lost_and_continues_the_last_line(run: workdir.Workdir) -> None:
    write(run, 10, 20, 30, 40)
    writer = MetricsWriter(run, 20, fail)
    assert [line["step"] for line in lines(run)] == [10, 20]
    writer.write(20, {"eval/test/bits_per_byte": 2.0})
    writer.write(30, {"train/loss": 9})
    writer.close()
    assert lines(run) == [
        {"step": 10, "train/loss": 5.0},
        {"step": 20, "train/loss": 10.0, "eval/test/bits_per_byte": 2.0},
        {"step": 30, "train/loss": 9},
    ]


@pytest.mark.parametrize("torn", ['{"step": 30, "train/l', "\n", '{"step": 30'])
def test_a_torn_last_line_is_dropped(run: workdir.Workdir, torn: str) -> None:
    write(run, 10, 20)
    with run.metrics.open("a") as file:
        file.write(torn)
    assert [record["step"] for record in read_metrics(run.metrics)] == [10, 20]
    write(run, 30, resume=20)
    assert [line["step"] for line in lines(run)] == [10, 20, 30]


@pytest.mark.parametrize(
    ("old", "new", "lost", "shown"),
    [
        (b'{"step": 20', b'{"step": 2\xb0', [20], "line 2"),
        (b'{"step": 20', b'{"ste": 20', [20], "line 2"),
        (b'{"step": 20', b'{"step": "x"', [20], "line 2"),
        (b"}\n", b"}", [10, 20, 30, 40, 50], "line 1"),
        (b"}\n", b"\0\n", [10, 20, 30, 40, 50], "line 1, 2, 3 and 2 more"),
        (b'{"step": 50', bytes(40), [50], "line 5"),
    ],
)
def test_damaged_lines_are_named_and_the_file_is_kept(
    run: workdir.Workdir, old: bytes, new: bytes, lost: list[int], shown: str
) -> None:
    steps = [10, 20, 30, 40, 50]
    write(run, *steps)
    damaged = run.metrics.read_bytes().replace(old, new)
    run.metrics.write_bytes(damaged)
    said: list[str] = []
    MetricsWriter(run, 50, said.append).close()
    assert [line["step"] for line in lines(run)] == [step for step in steps if step not in lost]
    assert (run.path / "metrics.damaged_1.jsonl").read_bytes() == damaged
    (message,) = said
    assert f"cannot read {shown};" in message and "a copy is metrics.damaged_1.jsonl" in message
    MetricsWriter(run, 50, fail).close()  # The damage is reported only once.
    run.metrics.write_bytes(bytes(99))
    MetricsWriter(run, 50, said.append).close()
    assert (run.path / "metrics.damaged_2.jsonl").read_bytes() == bytes(99)
    assert "cannot read line 1;" in said[1]


def test_a_last_line_that_only_lacks_its_end_is_kept(run: workdir.Workdir) -> None:
    write(run, 10)
    run.metrics.write_bytes(run.metrics.read_bytes().rstrip(b"\n"))
    write(run, 20, resume=10)
    assert [line["step"] for line in lines(run)] == [10, 20]


def events(run: workdir.Workdir) -> list[Event]:
    """Returns the events of all files, oldest file first.

    In a file, 12 bytes precede every event and begin with its length, and 4 bytes follow it.
    """
    found = []
    for path in sorted(run.tensorboard.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            found.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
    return found


def test_tensorboard_gets_the_same_numbers_and_hides_lost_steps(run: workdir.Workdir) -> None:
    write(run, 10, 20)
    write(run, 20, 30, resume=10)
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in events(run)
        for value in event.summary.value
    ]
    assert scalars == [(step, "train/loss", step / 2) for step in (10, 20, 20, 30)]
    starts = [event.step for event in events(run) if event.HasField("session_log")]
    assert starts == [1, 11]
    assert all(event.wall_time > 1e9 for event in events(run))


@pytest.mark.parametrize("later", [False, True])
def test_training_goes_on_without_tensorboard(
    run: workdir.Workdir, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not later:
        run.tensorboard.rmdir()
        run.tensorboard.touch()
    warnings: list[str] = []
    writer = MetricsWriter(run, 0, warnings.append)

    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    if later:
        monkeypatch.setattr(writer._tensorboard._writer, "write", full)
    for step in (1, 2):
        writer.write(step, {"a": 1})
    writer.close()
    assert len(warnings) == 1
    assert "TensorBoard is off" in warnings[0] and "metrics.jsonl is still written" in warnings[0]
    assert ("No space left on device" in warnings[0]) == later
    assert len(lines(run)) == 2


def test_metrics_that_cannot_be_written_stop_the_run(run: workdir.Workdir) -> None:
    run.metrics.mkdir()
    with pytest.raises(
        CheckpointError,
        match=r"^cannot write .*metrics.jsonl: Is a directory; see to the disk, then",
    ):
        MetricsWriter(run, 0, fail)
    run.metrics.rmdir()
    writer = MetricsWriter(run, 0, fail)
    writer._file.close()
    writer._file = open("/dev/full", "r+b", buffering=0)
    with pytest.raises(CheckpointError, match=r"cannot write .*: No space left on device; make"):
        writer.write(1, {"a": 1})
    writer.close()


class Clock:
    """A clock whose time the tests set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_speed_is_that_of_an_interval_without_pauses() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    with throughput.pause():  # The compilation before the first step counts for nothing.
        clock.now += 30
    for _ in range(4):
        throughput.step(500)
        clock.now += 0.25
    assert throughput.seconds_left(10) == 2.5
    assert throughput.rate() == (2000.0, 0.25, None)
    throughput.step(1000)
    clock.now += 2
    with throughput.pause():
        clock.now += 7
    assert throughput.rate() == (500.0, 2.0, None), "the interval before does not count"
    assert throughput.seconds_left(10) == 20, "but pauses do"
    throughput.step(1000)
    clock.now += 1
    assert throughput.rate() == (1000.0, 1.0, None), "the pause belongs to the interval before"


def metrics(nats: float, tokens: float, norm: float) -> StepMetrics:
    found = jnp.float32(nats), jnp.float32(tokens), jnp.float32(norm)
    return StepMetrics(*found, {"probe/used": found[0] / 2})


STEPS = [metrics(8.0, 4.0, 1.0), metrics(10.0, 2.0, 2.0), metrics(6.0, 6.0, 6.0)]


def test_the_loss_is_a_mean_over_tokens_and_the_norm_over_steps() -> None:
    accumulator = MetricAccumulator()
    for step, values in enumerate(STEPS):
        accumulator.add(step, values)
        assert accumulator.tokens_seen == (0, 4, 6)[step], "steps count one step late"
    accumulator.flush()
    assert accumulator.report() == {
        "train/loss": 2.0,
        "train/bits_per_token": pytest.approx(2 / math.log(2)),
        "train/gradient_norm": 3.0,
        "data/tokens": 12,
        "train/probe/used": 4.0,  # an additional metric of the task, averaged over steps
    }
    accumulator.add(3, STEPS[1])
    accumulator.flush()
    assert accumulator.report()["train/loss"] == 5.0 and accumulator.tokens_seen == 14


def test_an_accumulator_continues_from_its_saved_state() -> None:
    accumulator = MetricAccumulator()
    accumulator.add(0, STEPS[0])
    accumulator.flush()
    again = MetricAccumulator(json.loads(json.dumps(accumulator.state())))
    for m in (accumulator, again):
        m.add(1, STEPS[1])
        m.flush()
    assert again.state() == accumulator.state() and again.report() == accumulator.report()
