"""Injects faults into runs for hours and counts the outcomes; exits with 1 if anything is lost.

python tests/faults/soak.py --kills 1000 --flips 200 [--seed 0] [--tasks language,speech]
python tests/faults/soak.py --place gs --kills 300       # run directories in a bucket; or s3

The faults are: kills at random moments of every task, with one process and with two; a flipped bit
in every class of file; a full disk in every phase; a hung and a dead process; SIGTERM in every
phase; and every failing call of the file system in a short run of each command (calls.py). Each
run is started again until it is done and compared with an undisturbed run.

In a bucket (of a server on this machine, whose answers take some milliseconds), there are kills,
SIGTERM, processes that hang or die, and every failing request (bucket_calls.py).
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = map(str, (ROOT, ROOT / "tests", ROOT / "tests/sharded", Path(__file__).parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bucket_calls  # noqa: E402
import calls  # noqa: E402
from buckets import BucketServer, Fault  # noqa: E402
from harness import (  # noqa: E402
    PHASES,
    TASKS,
    UNCHECKED,
    BucketRuns,
    Life,
    Runs,
    damaged,
    flips,
    small_disk,
)  # fmt: skip
from tiny_runs import flip, state_hash  # noqa: E402

from brt.checkpointing import reader  # noqa: E402

_STEP = re.compile(r"\bstep (\d+)/")


class Soak:
    """Injects faults into the runs of one task and counts the outcomes."""

    def __init__(self, place: Path, seed: str, bucket: tuple[BucketServer, str] | None = None):
        self.place, self.draw, self.bucket = place, random.Random(seed), bucket
        self.counts, self.most = Counter(), {}
        self.failures: list[str] = []
        self._runs: dict[tuple[str, int], Runs] = {}

    def runs(self, task: str, processes: int) -> Runs:
        key = task, processes
        if key not in self._runs:
            place = self.place / f"{task}-{processes}"
            own = BucketRuns(place, *key, *self.bucket) if self.bucket else Runs(place, *key)
            self._runs[key] = own
        return self._runs[key]

    def workdir(self, own: Runs) -> Path:
        return Path(tempfile.mkdtemp(dir=own.place)) / "run"

    def at_most(self, name: str, value: float) -> None:
        """Keeps the maximum of the values that are recorded under a name."""
        self.most[name] = round(max(value, self.most.get(name, 0.0)), 2)

    def fail(self, what: str) -> None:
        """Records a failure and prints it at once, as the counts come hours later."""
        self.failures.append(what)
        print(f"FAILED {what}", flush=True)

    def check(self, own: Runs, workdir: Path, what: str) -> bool:
        """Returns True if a finished run equals an undisturbed one."""
        try:
            own.finish(workdir)
            own.assert_as_if_nothing_had_been(workdir)
        except AssertionError as error:
            self.fail(f"{what}: {workdir}: {str(error)[:2000]}")
            return False
        shutil.rmtree(workdir.parent)
        return True


def kills(soak: Soak, task: str, processes: int, count: int) -> None:
    """Kills a run at random moments until it is done, and then continues with the next run."""
    own, sent = soak.runs(task, processes), 0
    own.whole  # noqa: B018 - Runs once, so that all programs are compiled.
    begin = time.monotonic()
    own.live(soak.workdir(own))
    life = time.monotonic() - begin
    while sent < count:
        workdir, here, done = soak.workdir(own), 0, False
        while not done and here < count - sent:
            process = own.start(workdir)
            delay = soak.draw.uniform(0.2, 1.0) * life
            try:
                said = process.communicate(timeout=delay)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said = process.communicate()[0]
            done, found = process.returncode == 0, own.seen(workdir)
            if damage := damaged(found):
                soak.fail(f"killed after {delay:.1f} s: {damage}")
            if process.returncode not in (0, 75, -signal.SIGKILL):
                soak.fail(f"ended with {process.returncode}: {said[-2000:]}")
                break
            if process.returncode == -signal.SIGKILL:
                here += 1
                newest = max(reader.steps(found / "checkpoints"), default=0)
                last = max(map(int, _STEP.findall(said)), default=0)
                soak.at_most("steps lost at most", last - newest)
                soak.counts["kills that left a part of a checkpoint"] += _has_part(found)
        sent += here
        survived = soak.check(own, workdir, f"{here} kills of {task} as {processes}")
        soak.counts["kills sent"] += here
        soak.counts["kills survived"] += here * survived
        print(f"{task}, {processes} process(es): {sent} of {count} kills", flush=True)


def _has_part(workdir: Path) -> bool:
    saved = set(map(str, reader.steps(workdir / "checkpoints")))
    return any(path.is_dir() and path.name not in saved for path in workdir.glob("checkpoints/*"))


def corruptions(soak: Soak, task: str, count: int) -> None:
    """Flips a bit in a copy of a half-finished run, which is then resumed, a number of times."""
    own = soak.runs(task, 1)
    half = own.place / "half"
    if not (half / "run").exists():
        own.strike(half / "run", "evaluating", "terminate", 1)
    cache = own.place / "cache"
    shutil.copytree(cache, own.place / "cache.whole", dirs_exist_ok=True)
    for number, one in enumerate(list(flips(half / "run", cache, count, soak.draw))):
        workdir = soak.workdir(own)
        shutil.copytree(half / "run", workdir)
        in_cache = one.kind.startswith("cache/")
        target = one.file if in_cache else workdir / one.file.relative_to(half / "run")
        flip(target, one.bit)
        life = own.live(workdir)
        soak.counts["flips injected"] += 1
        outcome = _outcome(own, workdir, life, one.kind)
        soak.counts[f"flips: {outcome}"] += 1
        if outcome in ("silent", "crash"):
            said = life.said[-1500:]
            soak.fail(f"{outcome}: bit {one.bit} of {one.kind}: {life.code} {said}")
        shutil.rmtree(cache)
        shutil.copytree(own.place / "cache.whole", cache)
        shutil.rmtree(workdir.parent)
        print(f"{task}: {number + 1} of {count} flips: {one.kind}: {outcome}", flush=True)


def _outcome(own: Runs, workdir: Path, life: Life, kind: str) -> str:
    """Returns how a run reacted to a flipped bit: reported, refused, harmless, or worse."""
    if "Traceback" in life.said:
        return "crash"
    if life.code in (2, 3, 4) and "brt: error: " in life.said:
        return "refused with a sentence"
    try:
        own.assert_as_if_nothing_had_been(workdir)
        same = True
    except AssertionError:
        same = False
    told = "warning: " in life.said or "damaged" in life.said
    if kind == UNCHECKED and not (same or told) and state_hash(workdir) == state_hash(own.whole):
        return "another number in metrics.jsonl, which has no checksum"
    if life.code == 0 and told:
        return "told, and gone on from what is whole" if same else "told, and another result"
    return "of no matter: the same result" if life.code == 0 and same else "silent"


def full_disks(soak: Soak, task: str) -> None:
    """Fills the disk in each phase of a run of its own."""
    own = soak.runs(task, 1)
    for phase, number in PHASES.items():
        disk = own.place / f"disk-{phase}"
        take_away = small_disk(disk)
        if take_away is None:
            print("full disks: left out, this machine does not let us mount a file system")
            return
        try:
            if phase in ("restoring", "seeking"):
                own.strike(disk / "lives" / "run", "evaluating", "terminate")
            own.strike(disk / "lives" / "run", phase, "full", number)
            (disk / "lives/filler").unlink(missing_ok=True)
            soak.counts["full disks"] += 1
            soak.counts["full disks survived"] += soak.check(
                own, disk / "lives" / "run", f"full while {phase}"
            )
        except AssertionError as error:
            soak.fail(f"full disk while {phase}, {task}: {str(error)[:2000]}")
        finally:
            take_away()
    print(f"{task}: full disks in {len(PHASES)} phases", flush=True)


def signals(soak: Soak, task: str, processes: int) -> None:
    """Measures the time from SIGTERM to the exit in every phase."""
    own = soak.runs(task, processes)
    workdir = soak.workdir(own)
    for phase, number in PHASES.items():
        life = own.strike(workdir, phase, "terminate", number)
        if life.struck:
            name = f"seconds from SIGTERM to the exit, {processes} process(es)"
            soak.at_most(name, life.seconds_from_strike())
        soak.counts["SIGTERMs"] += life.struck
    soak.check(own, workdir, f"SIGTERMs of {task}")


def peers(soak: Soak, task: str) -> None:
    """Kills or suspends one of two processes; checks that the other one ends and reports it."""
    own = soak.runs(task, 2)
    for fault, process in [("kill", 1), ("stop", 1), ("kill", 0), ("stop", 0)]:
        workdir = soak.workdir(own)
        life = own.strike(workdir, "stepping", fault, 2, process=process)
        name = "dead" if fault == "kill" else "hung"
        who = "the first" if process == 0 else "another"
        seconds = life.seconds_from_strike("start all processes again")
        soak.at_most(f"seconds from a {name} peer ({who}) to the sentence", seconds)
        soak.counts[f"{name} peers"] += 1
        soak.counts[f"{name} peers survived"] += soak.check(own, workdir, f"{name} peer {process}")
        print(
            f"{task}: {name} peer, process {process}: {life.said.splitlines()[-1][:200]}",
            flush=True,
        )


def ordeal(soak: Soak, task: str, kills_: dict[int, int], flips_: int, of_two: bool) -> None:
    """Runs all requested faults on one task, one after the other."""
    for processes, share in kills_.items():
        if share:
            kills(soak, task, processes, share)
    if flips_:
        corruptions(soak, task, flips_)
    if not soak.bucket:
        full_disks(soak, task)
    signals(soak, task, 1)
    if of_two:
        signals(soak, task, 2)
        peers(soak, task)


def failing_calls(passes: int, every: int, scheme: str) -> bool:
    """Returns True if a failing call or request loses something or goes unreported."""
    if not passes:
        return False
    if scheme:
        command = [sys.executable, str(Path(bucket_calls.__file__)), f"--schemes={scheme}"]
        return subprocess.run([*command, f"--every={every}"]).returncode != 0
    done = calls.start([f"--passes={passes}", f"--every={every}"])
    if done is None:
        print("failing calls: left out, this machine is not Linux or has no C compiler")
    return done is not None and done.returncode != 0


def main() -> int:
    args = parser().parse_args()
    tasks = args.tasks.split(",")
    if unknown := set(tasks) - TASKS.keys():
        parser().error(f"--tasks has {', '.join(unknown)}; there are {', '.join(TASKS)}")
    shares = iter(_shared(args.kills, 2 * len(tasks)))
    kills_ = [{processes: next(shares) for processes in (1, 2)} for _ in tasks]
    scheme = "" if args.place == "local" else args.place
    flips_ = _shared(0 if scheme else args.flips, len(tasks))
    with tempfile.TemporaryDirectory(prefix="brt-soak-") as place, BucketServer() as server:
        server.faults = lambda request: Fault("delay", seconds=request.number % 10 * 0.005)
        bucket = (server, scheme) if scheme else None
        soaks = [Soak(Path(place), f"{args.seed} {task}", bucket) for task in tasks]
        with ThreadPoolExecutor(2) as pool:
            first = [task == tasks[0] for task in tasks]
            list(pool.map(ordeal, soaks, tasks, kills_, flips_, first))
    report(soaks)
    return failing_calls(args.passes, args.every, scheme) | any(soak.failures for soak in soaks)


def _shared(whole: int, parts: int) -> list[int]:
    return [whole * (part + 1) // parts - whole * part // parts for part in range(parts)]


def report(soaks: list[Soak]) -> None:
    """Prints the counts of all tasks, the longest times, and the failures."""
    counts, most = Counter(), {}
    for soak in soaks:
        counts.update(soak.counts)
        most |= {name: max(value, most.get(name, 0.0)) for name, value in soak.most.items()}
    for name, value in [*sorted(counts.items()), *sorted(most.items())]:
        print(f"{name:<60} {value}")
    for soak in soaks:
        for failure in soak.failures:
            print(f"FAILED {failure}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--place", choices=["local", "gs", "s3"], default="local")
    flags.add_argument("--kills", type=int, default=1000, help="SIGKILLs over all; default 1000")
    flags.add_argument("--flips", type=int, default=200, help="bits over all; default 200")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--tasks", default=",".join(TASKS), help="default: all of them")
    flags.add_argument(
        "--passes", type=int, default=1,
        help="over the calls of the file system, each with other errors; 5: all of them; default 1",
    )  # fmt: skip
    flags.add_argument("--every", type=int, default=1, help="one call of so many; default all")
    return flags


if __name__ == "__main__":
    sys.exit(main())
