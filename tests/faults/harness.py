"""Runs the command with injected faults, and checks a run that was restarted until it was done."""

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import buckets
import numpy as np
from buckets import BucketServer
from sharded_cases import CASES, documents
from tiny_runs import environment, metrics, state_hash

from brt.checkpointing import manifest, reader
from brt.config import Checkpoint, Config, Evaluation, Mesh
from brt.config_io import config_text

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "launch/local/run_processes.py"
STRUCK = Path(__file__).with_name("struck.py")
STEPS, SAVES = 8, 2
TASKS: dict[str, Callable[[Path], Config]] = {
    "language": lambda place: documents(place, {"Recurrence.layers": (0,), "layers": 1}),
    "masked": CASES["masked"],
    "summaries": CASES["t5"],
    "sentences": CASES["classification"],
    "questions": CASES["questions"],
    "speech": CASES["speech"],
}
# Phases in the order in which successive starts reach them, and at which entry the fault strikes.
PHASES = {
    "starting": 1, "compiling": 1, "stepping": 1, "saving": 1, "committing": 1, "restoring": 1,
    "seeking": 1, "evaluating": 1, "ending": 1,
}  # fmt: skip
# Exit codes that a start with this fault may have. 0 is possible if the phase is the last one that
# does anything. JAX aborts with 134 if the first process of a run has ended.
CODES = {
    "kill": {-9, 137}, "terminate": {0, 75}, "interrupt": {0, 75}, "hang": {70, 75, 134},
    "sleep": {70, 75, 134}, "full": {0, 4}, "stop": {75, 137},
}  # fmt: skip
LONGEST_LIFE = 1800  # seconds; long, because other tests may run on the same machine


class Life(NamedTuple):
    """One start of the command, from its beginning to its end."""

    code: int
    lines: list[tuple[float, str]]  # lines with the time when each was read
    ended: float

    @property
    def said(self) -> str:
        return "".join(line for _, line in self.lines)

    @property
    def struck(self) -> bool:
        return "struck: " in self.said

    def seconds_from_strike(self, until: str | None = None) -> float:
        """Returns the seconds from the fault to the first line with `until`, or to the end."""
        struck = next(at for at, line in self.lines if "struck: " in line)
        said = (at for at, line in self.lines if until and until in line)
        return next(said, self.ended) - struck


class Runs:
    """Runs of one task that share prepared data and compiled programs.

    Args:
      place: a directory of its own.
      task: one of TASKS.
      processes: number of processes of each run.
    """

    def __init__(self, place: Path, task: str, processes: int = 1):
        self.place, self.processes = place, processes
        place.mkdir(parents=True, exist_ok=True)
        config = _config(TASKS[task](place), processes)
        self.gin = place / "run.gin"
        self.gin.write_text(config_text(config))
        flags = os.environ.get("XLA_FLAGS", "") or "--xla_backend_optimization_level=0"
        self._environment = environment(place) | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": re.sub(r"\S*host_platform_device_count\S*", "", flags),
        }
        self._whole: Path | None = None

    def name(self, workdir: Path) -> str:
        """Returns the --workdir that a run has for the command."""
        return str(workdir)

    def seen(self, workdir: Path) -> Path:
        """Returns a directory with the files that others find in a run directory now."""
        return workdir

    def start(
        self, workdir: Path, *bindings: str, strike: tuple[str, int, str] | None = None,
        process: int = 0,
    ) -> subprocess.Popen:  # fmt: skip
        """Starts the command, with a fault (phase, count, fault) in one of its processes."""
        workdir.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "brt.train"]
        if strike:
            command = [sys.executable, str(STRUCK), *map(str, strike), str(process)]
        command += [f"--gin_file={self.gin}", f"--workdir={self.name(workdir)}"]
        command += [f"--gin_bindings={binding}" for binding in bindings]
        if self.processes > 1:
            split = [sys.executable, str(LAUNCHER), f"--processes={self.processes}"]
            command = [*split, "--", *command]
        return subprocess.Popen(
            command, env=self._environment, cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def live(self, workdir: Path, *bindings: str, **strike: Any) -> Life:
        """Starts the command as `start` does, and waits until it ends."""
        with self.start(workdir, *bindings, **strike) as process:
            late = threading.Timer(LONGEST_LIFE, os.killpg, [process.pid, signal.SIGKILL])
            late.start()
            lines = [(time.monotonic(), line) for line in process.stdout]
            code = process.wait()
        assert late.is_alive(), f"did not end: {lines}"
        late.cancel()
        late.join()
        return Life(code, lines, time.monotonic())

    def strike(
        self, workdir: Path, phase: str, fault: str, count: int = 1, *bindings: str,
        process: int = 0,
    ) -> Life:  # fmt: skip
        """Runs the command with a fault in a phase; checks its exit code and its checkpoints."""
        life = self.live(workdir, *bindings, strike=(phase, count, fault), process=process)
        place = f"{fault} while {phase}: {life.said}"
        if life.struck:
            assert life.code in CODES[fault], f"{life.code}, {place}"
        else:
            assert life.code == 0, f"{life.code}, {place}"
        assert "Traceback" not in life.said, place
        assert not (damage := damaged(self.seen(workdir))), f"{place}: {damage}"
        return life

    def finish(self, workdir: Path, lives: int = 3) -> Life:
        """Starts the command again until the run is done."""
        for _ in range(lives):
            life = self.live(workdir)
            if life.code == 0:
                return life
            assert life.code == 75, life.said
        raise AssertionError(f"not done after {lives} starts: {life.said}")

    @property
    def whole(self) -> Path:
        """The workdir of an undisturbed run."""
        if self._whole is None:
            path = self.place / "whole"
            self.finish(path, 1)
            self._whole = path
        return self._whole

    def assert_as_if_nothing_had_been(self, workdir: Path) -> None:
        """Checks for the same state, the same metrics, and no leftover files."""
        whole, found = self.whole, self.seen(workdir)
        assert state_hash(found) == state_hash(whole), "another state"
        assert metrics(found) == metrics(whole), "other metrics"
        assert not (left := self.litter(found)), f"left lying about: {left}"

    def litter(self, workdir: Path) -> list[str]:
        return litter(workdir)


class BucketRuns(Runs):
    """Runs in the bucket of a server. Its undisturbed run is a local one.

    `seen` puts a copy of the objects where a local run would be.
    """

    def __init__(self, place: Path, task: str, processes: int, server: BucketServer, scheme: str):
        super().__init__(place, task, processes)
        self._server, self._scheme = server, scheme
        self._environment |= buckets.environment(server) | {"XDG_CACHE_HOME": str(place / "home")}

    def name(self, workdir: Path) -> str:
        local = workdir == self.place / "whole"
        return str(workdir) if local else f"{self._scheme}://bucket/{workdir.relative_to('/')}"

    def seen(self, workdir: Path) -> Path:
        shutil.rmtree(workdir, ignore_errors=True)
        self._server.copy("bucket", str(workdir.relative_to("/")), workdir)
        return workdir

    def litter(self, workdir: Path) -> list[str]:
        """Returns also local copies that no process has deleted."""
        copies = self.place.glob("home/brt/buckets/*/")
        return litter(workdir) + [str(path) for path in copies if path.is_dir()]


def _config(config: Config, processes: int) -> Config:
    """Shortens a config so that the run saves and evaluates a few times within seconds."""
    training = dataclasses.replace(
        config.training, steps=STEPS, log_every=1, evaluate_every=4, sample_every=0, plots=False,
        probe_every=0,
    )  # fmt: skip
    name = next(
        n for n in ("pairs", "sentences", "questions", "speech", "data") if _differs(config, n)
    )
    data = getattr(config, name)
    if name == "data":
        held_out = {"validation_fraction": 0.2}
    else:
        held_out = {"validation": (_last_quarter(Path(data.train[0])),)}
    return dataclasses.replace(
        config, training=training, checkpoint=Checkpoint(every=SAVES),
        mesh=Mesh(data=processes), evaluation=Evaluation(tokens_per_document=64),
        **{name: dataclasses.replace(data, **held_out)},
    )  # fmt: skip


def _last_quarter(rows: Path) -> str:
    """Moves the last quarter of a file of training rows to a file of its own, which is held out."""
    other = rows.with_stem("held_out")
    if rows.suffix == ".npz":
        with np.load(rows) as stored:
            arrays = dict(stored)
        cut = 3 * len(arrays["ids"]) // 4
        frames = arrays["lengths"][:cut].sum()
        for path, part, features in (
            (rows, slice(cut), slice(frames)), (other, slice(cut, None), slice(frames, None))
        ):  # fmt: skip
            own = {name: x[features if name == "features" else part] for name, x in arrays.items()}
            np.savez(path, **own)
        return str(other)
    if rows.suffix == ".json":
        found = json.loads(rows.read_text())["data"][0]["paragraphs"]
    else:
        found = rows.read_text().splitlines()
    cut = 3 * len(found) // 4
    for path, part in ((rows, found[:cut]), (other, found[cut:])):
        document = {"data": [{"paragraphs": part}]}
        path.write_text(json.dumps(document) if rows.suffix == ".json" else "\n".join(part))
    return str(other)


def _differs(config: Config, name: str) -> bool:
    return getattr(config, name) != type(getattr(config, name))()


def damaged(workdir: Path) -> list[str]:
    """Returns what is wrong with the checkpoints that count as saved."""
    steps = reader.steps(workdir / "checkpoints")
    found = {step: manifest.verify(workdir / f"checkpoints/{step}") for step in steps}
    return [f"checkpoint {step}: {problems}" for step, problems in found.items() if problems]


def litter(workdir: Path) -> list[str]:
    """Returns the leftover files of a killed or failed process."""
    saved = set(map(str, reader.steps(workdir / "checkpoints")))
    found = [path.name for path in workdir.glob("checkpoints/*") if path.name not in saved]
    hidden = [path for path in workdir.rglob(".*") if path != workdir / ".lock"]
    ends = [path for path in workdir.rglob("*") if re.search(r"(partial|deleted|tmp)$", path.name)]
    return found + [str(path) for path in {*hidden, *ends}]


class Flip(NamedTuple):
    """A bit of a file that is inverted."""

    kind: str  # kind of the file
    file: Path
    bit: int


# Lines of metrics.jsonl have no checksum, so a changed digit is not noticed.
UNCHECKED = "workdir/metrics.jsonl"


def file_classes(workdir: Path, cache: Path) -> dict[str, list[Path]]:
    """Returns all files that a resumed run could read, by the kind of file."""
    found: dict[str, list[Path]] = {}
    for base, name in ((workdir, "workdir"), (cache, "cache")):
        for path in sorted(p for p in base.rglob("*") if p.is_file() and p.stat().st_size):
            parts = path.relative_to(base).parts
            if "tensorboard" in parts or "compiled" in parts or "xla" in parts:
                continue
            kind = "/".join(re.sub(r"^[0-9a-f]{8,}$|^[0-9]+(?=\.|$)", "N", part) for part in parts)
            kind = re.sub(r"state/.*", "state", kind)
            found.setdefault(f"{name}/{kind}", []).append(path)
    return found


def flips(workdir: Path, cache: Path, count: int, draw: random.Random) -> Iterator[Flip]:
    """Yields a number of flips, taking the classes of files in turn."""
    classes = file_classes(workdir, cache)
    for number in range(count):
        kind = sorted(classes)[number % len(classes)]
        file = draw.choice(classes[kind])
        yield Flip(kind, file, draw.randrange(8 * file.stat().st_size))


def small_disk(path: Path, size: str = "16m") -> Callable[[], None] | None:
    """Mounts a small file system; returns a function that unmounts it, or None if not permitted."""
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount).returncode:
        return None
    return lambda: subprocess.run(["umount", "--lazy", str(path)], check=True) and None
