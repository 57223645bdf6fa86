"""Shows the progress of a run, measures its speed, and records profiler traces.

On a terminal the progress is shown as a moving bar, in other streams as lines. All lines are also
written to log.txt in the run directory.

The training loop sets the phase that a run is in, such as compiling or evaluating. The progress
bar and the watchdog, which ends a run that hangs, read the phase.
"""

import contextlib
import datetime
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import jax
from tqdm import tqdm

from brt import durable, output
from brt.formatting import clock, one_line, printable, sentence, short
from brt.training.chips import peak_flops
from brt.training.workdir import Workdir, refuse_links

# In these phases a run shows no sign of progress until the phase ends.
WITHOUT_PROGRESS = (
    "starting", "compiling", "restoring", "seeking", "saving", "committing", "ending",
)  # fmt: skip
# In these phases a run regularly checks for requests to stop.
_INTERRUPTIBLE = ("stepping", "evaluating", "sampling")


class RunStatus(NamedTuple):
    """The activity of a run at one moment."""

    # "starting", "compiling", "restoring" (a checkpoint), "seeking" (the position in the data),
    # "stepping" (training), "evaluating", "sampling", "saving" (copying the arrays for a
    # checkpoint), "committing" (completing a checkpoint) or "ending".
    phase: str
    step: int  # number of completed training steps
    # The time (`time.monotonic`) of the last sign of progress, such as a completed step, an
    # evaluated batch, a sampled token, or the beginning of a phase.
    last_progress: float
    background: str = ""  # the phase of the thread that saves in the background; "" while idle


class PhaseTracker:
    """Holds the current status of a run, notifies listeners, and adds up the time of each phase.

    The main thread changes the status. Every thread may read the status (`now`), because the status
    is a single value that is replaced as a whole. If the `step` of a method is None, the number of
    completed steps does not change. `began` is the time at which the process began; None if the
    process was not started to train.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, began: float | None = None):
        self._clock = clock
        self._listeners: list[Callable[[RunStatus], None]] = []
        self._background = ""
        self._counted = now = clock()
        self._status = RunStatus("starting", 0, now)
        self._seconds = {} if began is None else {"imports and settings": now - began}

    @property
    def now(self) -> RunStatus:
        return self._status._replace(background=self._background)

    def listen(self, listener: Callable[[RunStatus], None]) -> None:
        """Registers a function to call when a phase, or work in the background, begins or ends."""
        self._listeners.append(listener)

    def enter(self, phase: str, step: int | None = None) -> None:
        completed = self._status.step if step is None else step
        self._status = RunStatus(phase, completed, self._count(self._status.phase))
        self._notify()

    @contextlib.contextmanager
    def during(self, phase: str, step: int | None = None) -> Iterator[None]:
        """Context that begins a phase, and begins the previous phase again at the context's end.

        If an error is raised within the context, the status keeps the phase of the error.
        """
        previous = self._status.phase
        self.enter(phase, step)
        yield
        self.enter(previous)

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Context whose time is counted under `name`, and not under the current phase."""
        self._count(self._status.phase)
        yield
        self._count(name)

    def seconds(self) -> Mapping[str, float]:
        """Returns the time spent so far in each phase and, by name, in each `counting` context."""
        self._count(self._status.phase)
        return self._seconds

    def _count(self, name: str) -> float:
        before, self._counted = self._counted, self._clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + self._counted - before
        return self._counted

    @contextlib.contextmanager
    def in_background(self, phase: str) -> Iterator[None]:
        """Context in which the status has `phase` as `background`; used by the saving thread."""
        self._background = phase
        self._notify()
        try:
            yield
        finally:
            self._background = ""
            self._notify()

    def progressed(self, step: int | None = None) -> None:
        """Records progress within a phase; cheap enough to be called for every step or batch."""
        completed = self._status.step if step is None else step
        self._status = self._status._replace(step=completed, last_progress=self._clock())

    @property
    def uninterruptible(self) -> str:
        """Name of the current phase if a request to stop has to wait for its end; otherwise ""."""
        return "" if self._status.phase in _INTERRUPTIBLE else self._status.phase

    def _notify(self) -> None:
        for listener in self._listeners:
            listener(self.now)


def until_first_step(seconds: Mapping[str, float]) -> str:
    """Returns a line about the time until the end of the first step.

    `seconds` maps each phase to its time, as `PhaseTracker.seconds` returns it.
    """
    names = {"stepping": "first step", "starting": "other"}
    tenths = {names.get(name, name): round(10 * time) for name, time in seconds.items()}
    tenths["other"] = tenths.pop("other", 0)  # It comes last.
    parts = ", ".join(f"{name} {time / 10:.1f} s" for name, time in tenths.items() if time)
    return f"first step {sum(tenths.values()) / 10:.1f} s after the start: {parts or '0.0 s'}"


# The beginning of these phases is not announced, because other messages report it.
_SILENT = ("starting", "stepping")
# After these phases, a message says how long the phase took.
_TIMED = ("restoring", "compiling")


class Progress:
    """Shows the progress of a run to the user, and appends every line with its time to a log.

    The run resumes from `initial_step`. The progress is written to `stream` (None: stderr): as a
    moving bar if `bar` is True, as lines if it is False. A `bar` of None stands for a bar on
    terminals of known width, and for lines elsewhere. OSError is raised if the log cannot be opened
    because the disk fails or denies access.
    """

    def __init__(
        self,
        steps: int,
        *,
        initial_step: int = 0,
        log: Path,
        stream: io.TextIOBase | None = None,
        bar: bool | None = None,
    ):
        self._steps = steps
        self._stream = stream or sys.stderr
        self._evaluation = ""
        self._metrics = ""
        self._phase, self._began = _SILENT[0], time.perf_counter()
        self._bar: tqdm | None = None
        self._log: IO[str] | None = None
        try:
            self._log = durable.open_file(log, "a")
        except OSError as error:
            if durable.storage_refuses(error):
                raise  # The other files of the run are on the same disk, so they would fail, too.
            self.message(f"warning: {log} cannot be written: {error.strerror}")
        if bar if bar is not None else _has_width(self._stream):
            self._bar = tqdm(
                total=steps,
                initial=initial_step,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def report(
        self, step: int, *, bits_per_token: float, tokens_per_second: float, seconds_left: float
    ) -> None:
        metrics = (
            f"train {bits_per_token:.2f} bits/token  {short(tokens_per_second)} tokens/s  "
            f"ETA {clock(seconds_left)}"
        )
        self._show_metrics(step, metrics)

    def report_first_step(self, step: int, bits_per_token: float) -> None:
        """Shows the loss of the first step, so that the user need not wait for the first report."""
        self._show_metrics(step, f"train {bits_per_token:.2f} bits/token")

    def evaluation(self, step: int, summary: str) -> None:
        """Shows a line about an evaluation; the bar shows `summary` until the next evaluation."""
        self._evaluation = summary
        self.message(f"step {step}/{self._steps}  {self._evaluation}")
        self._refresh_bar(step)

    def message(self, text: str) -> None:
        """Shows a line, which stays visible above the bar, and writes the line to log.txt."""
        self._show(text)
        self._write_log(one_line(text))

    def note(self, text: str) -> None:
        self._write_log(text)

    def phase(self, now: RunStatus) -> None:
        """Announces the beginning of a phase; after restoring or compiling, says how long it took.

        On a terminal the bar shows the name of the phase until the phase ends.
        """
        if now.phase == self._phase:
            return
        before, self._phase = self._phase, now.phase
        took, self._began = time.perf_counter() - self._began, time.perf_counter()
        if before in _TIMED:
            self.message(f"{before}: {took:.1f} s")
        if now.phase in _SILENT:
            self._refresh_bar(now.step)
            return
        text = f"step {now.step}/{self._steps}  " * bool(now.step) + f"{now.phase} ..."
        self._write_log(text)
        if self._bar is None or now.phase in _TIMED:
            self._show(text)
        self._refresh_bar(now.step)

    def close(self) -> None:
        """Closes the log, and stops updating the bar, which stays visible."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _show_metrics(self, step: int, metrics: str) -> None:
        self._metrics = metrics
        self._write_log(f"step {step}/{self._steps}  {metrics}")
        if self._bar is None:
            self._show(f"step {step}/{self._steps}  {metrics}")
        else:
            self._refresh_bar(step)

    def _refresh_bar(self, step: int) -> None:
        self.step(step)
        if self._bar is not None:
            doing = f"{self._phase} ..." * (self._phase not in _SILENT)
            parts = filter(None, (self._metrics, self._evaluation, doing))
            self._bar.set_postfix_str("  ".join(parts))

    def _show(self, text: str) -> None:
        if self._bar is None:
            output.say(text, self._stream)
        else:
            self._bar.write(sentence(text), file=self._stream)

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        now = datetime.datetime.now().isoformat(sep=" ", timespec="seconds")
        try:
            self._log.write("".join(f"{now}  {line}\n" for line in printable(text).splitlines()))
            self._log.flush()
        except OSError as error:
            log, self._log = self._log, None
            with contextlib.suppress(OSError):
                log.close()
            self._show(f"warning: log.txt cannot be written: {error.strerror}")


def _has_width(stream: io.TextIOBase) -> bool:
    """Returns True if the stream is a terminal with a width above 0.

    Some terminals, such as the one that the command `script` provides, have the width 0.
    """
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # A stream that is not a file raises io.UnsupportedOperation, an OSError.
        return False


class Rate(NamedTuple):
    """Speed of training over an interval, without pauses."""

    tokens_per_second: float
    step_seconds: float  # mean over the steps
    flops_per_second: float | None  # None if the FLOPs of a step are not known


class Throughput:
    """Measures the speed of training: tokens per second, without pauses.

    Steps run asynchronously, so `rate` has to be called after waiting for the last step's result.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._created = self._started = clock()
        self._paused = 0.0
        self._tokens = self._steps = self._all_steps = 0
        self._flops: int | None = 0

    def step(self, tokens: int, flops: int | None = None) -> None:
        """Counts a step; if its FLOPs are None, the FLOPs of the whole interval are unknown."""
        self._tokens += tokens
        self._flops = None if flops is None or self._flops is None else self._flops + flops
        self._steps += 1
        self._all_steps += 1

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context whose time does not count as training, such as the time of an evaluation."""
        begin = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self._paused += now - begin
            # A pause before the first step, in which the run compiles, does not occur again. The
            # clock therefore starts again after this pause, so that `seconds_left` expects no more
            # pauses of this length.
            if not self._all_steps:
                self._created, self._started, self._paused = now, now, 0.0

    def rate(self) -> Rate:
        """Returns the speed since the last call; at least one step must have been counted since."""
        now = self._clock()
        seconds = now - self._started - self._paused
        flops = None if self._flops is None else self._flops / seconds
        rate = Rate(self._tokens / seconds, seconds / self._steps, flops)
        self._started, self._paused = now, 0.0
        self._tokens = self._steps = self._flops = 0
        return rate

    def seconds_left(self, steps: int) -> float:
        """Returns the seconds that `steps` more steps will take if pauses stay as frequent."""
        return (self._clock() - self._created) / self._all_steps * steps


def utilization(flops_per_second: float | None, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Returns {"perf/mfu": FLOPs per second / peak of all devices}; {} if not known."""
    peak = peak_flops(mesh.devices.flat[0])
    if not (flops_per_second and peak):
        return {}
    return {"perf/mfu": flops_per_second / (peak * mesh.size)}


class Profile:
    """Records a profiler trace of steps.

    `steps` are the numbers of the first and the last step to trace; () for no trace.
    """

    def __init__(self, steps: tuple[int, ...], workdir: Workdir):
        self._steps, self._workdir, self._running = steps, workdir, False

    def before(self, step: int) -> None:
        """Starts the trace if `step`, which is about to run, is the first step to trace."""
        if self._steps and step == self._steps[0] and not self._running:
            # The profiler would follow symbolic links to places outside of the run directory.
            refuse_links(self._workdir)
            jax.profiler.start_trace(str(self._workdir.tensorboard))
            self._running = True

    def after(self, step: int, wait_for: object) -> bool:
        """Ends the trace if `step` is the last step to trace; returns True in this case.

        Before the trace ends, the method waits until the arrays `wait_for` have been computed.
        """
        if not (self._running and step >= self._steps[1]):
            return False
        jax.block_until_ready(wait_for)
        self.close()
        return True

    def close(self) -> None:
        """Ends a trace that is still running."""
        # If the run directory has been moved, the trace is not written, because the profiler would
        # create the directory again.
        if self._running and self._workdir.tensorboard.is_dir():
            self._running = False
            # jax raises RuntimeError if another part of the program has already stopped the trace.
            with contextlib.suppress(RuntimeError):
                jax.profiler.stop_trace()
