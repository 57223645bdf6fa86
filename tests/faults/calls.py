"""Makes the n-th call of the file system fail, for every n of a short life of each command.

python tests/faults/calls.py                                    # all of it: most of an hour
python tests/faults/calls.py --commands train --kinds write,fsync --every 20 --errors ENOSPC

A case is a command, a kind of call, a number n, an error, and whether all later calls of the kind
fail, too. The command must end with exit code 4 and one sentence, or with 0 if its result is
complete. If a run directory turns out to be read-only, brt.evaluate may end with 0, too, if it says
so. There must be no traceback, and every checkpoint that brt counts as saved must be complete. If
the command is run again, it must give the same result as an undisturbed run, and leave no temporary
files. All cases share one process, so that imports and compilation happen only once. The library
`failing_calls.c` has to be preloaded, so this file starts itself again with it.
"""

import argparse
import contextlib
import ctypes
import errno
import gc
import hashlib
import importlib
import io
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = map(str, (ROOT, ROOT / "tests", ROOT / "tests/sharded", Path(__file__).parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

SHIM = Path(__file__).with_name("failing_calls.c")
KINDS = {
    "write": 1, "short": 1, "fsync": 2, "rename": 4, "link": 8, "unlink": 16, "mkdir": 32,
    "open": 64, "truncate": 128, "any": 255,
}  # fmt: skip
SHORT, KILL = -1, -9
ERRORS = ("ENOSPC", "EIO", "EROFS", "EACCES", "EDQUOT")
LIBRARY = "BRT_FAILING_CALLS"  # environment variable with the path of the preloaded library


def build(place: Path) -> Path | None:
    """Compiles the library; returns None if there is no C compiler or the system is not Linux."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or sys.platform != "linux":
        return None
    library = place / "failing_calls.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIM), "-ldl"]
    subprocess.run(command, check=True)
    return library


class Calls:
    """The preloaded library, which counts calls below a directory and makes some of them fail."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[LIBRARY], mode=ctypes.RTLD_GLOBAL)
        self._library.failed_call.restype = ctypes.c_char_p
        self._library.counted_calls.restype = ctypes.c_long
        numbers = ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int
        self._library.arm_calls.argtypes = [ctypes.c_char_p, *numbers]

    @contextlib.contextmanager
    def armed(self, place: Path, kind: str, n: int = 0, error: int = 0, sticky: bool = False):  # noqa: ANN201
        """Makes the n-th call of a kind (of KINDS) below a directory fail; 0 only counts calls.

        `error` is the errno of the failed call, SHORT or KILL. If `sticky`, all later calls fail,
        too. At the end, `count` is the number of calls, and `hit` names the failed call.
        """
        self._library.arm_calls(os.fsencode(place), KINDS[kind], n, error, sticky)
        try:
            yield
        finally:
            self.count = self._library.counted_calls()
            self.hit = self._library.failed_call().decode()
            self._library.arm_calls(b"", 0, 0, 0, 0)


class Life(NamedTuple):
    """Exit code and output of a command that ran in this process."""

    code: int
    said: str


def live(arguments: Sequence[str]) -> Life:
    """Runs a command such as `brt.train --flag ...` in this process; returns code and output."""
    from brt import command_line
    from brt.training import evaluations

    evaluations._say_once.cache_clear()  # What a process says once, each life says.
    module = importlib.import_module(arguments[0])
    said, code = io.StringIO(), 0
    given, sys.argv[:] = list(sys.argv), arguments
    log = logging.StreamHandler(said)  # also messages of the garbage collection below
    logging.getLogger().addHandler(log)
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            command_line.main(module.main, module.parser())
        except SystemExit as end:
            code = end.code or 0
        except BaseException:  # noqa: BLE001 - A process would print a traceback.
            traceback.print_exc(file=said)
            code = 1
    gc.collect()
    logging.getLogger().removeHandler(log)
    sys.argv[:] = given
    return Life(code, said.getvalue())


def keep_compiled() -> None:
    """Caches the compiled step, the initial state and the shapes of each config.

    All runs of a config in this process share them, so that a run takes less time.
    """
    import jax
    import numpy as np

    from brt.checkpointing import writer
    from brt.training import run as runs

    kept: dict[Any, Any] = {}

    def once(function: Callable, key: Callable[..., Any]) -> Callable:
        def call(*args: Any, **named: Any) -> Any:
            name = function.__name__, key(*args)
            if name not in kept:
                kept[name] = function(*args, **named)
            return kept[name]

        return call

    first = once(
        lambda run, say: jax.device_get(new_state(run, say)), lambda run, say: repr(run.config)
    )

    def copy(run: Any, say: Callable[[str], object] = print) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, run.state_shapes)
        return jax.device_put(jax.tree.map(np.array, first(run, say)), shardings)

    new_state = runs.new_state
    runs.new_state = copy
    runs.compiled_step = once(runs.compiled_step, lambda run: repr(run.config))
    writer._LATE_LOOKS, writer._LATE_SECONDS = 20, 0.02
    runs.compute_shapes = once(
        runs.compute_shapes, lambda config, *devices: (repr(config), devices)
    )


class Command(NamedTuple):
    """A command that runs in its own directory, and the result that it must leave there.

    `again` is the exit code if a finished command is run again: 2 if it refuses to replace its
    result.
    """

    prepare: Callable[[Path], object]
    arguments: Callable[[Path], list[str]]
    result: Callable[[Path], Any]
    litter: Callable[[Path], list[str]]
    again: int = 0


def commands(place: Path, names: Sequence[str]) -> dict[str, Command]:
    """Returns all commands that write files; `place` holds the texts, config, run and sweep they
    share.
    """
    from harness import litter

    gin, sweep = _configs(place)
    trained, swept = place / "trained", place / "swept"
    train = ["brt.train", f"--gin_file={gin}"]
    assert (life := live([*train, f"--workdir={trained}"])).code == 0, life.said
    texts = sorted(map(str, (place / "texts").glob("*.txt")))
    huggingface = ROOT / "tests/data/huggingface/bart"

    def in_copy(source: Path) -> Callable[[Path], object]:
        return lambda here: shutil.copytree(source, here / "run")

    def one(*arguments: str, prepare: Callable = lambda here: None, again: int = 0) -> Command:
        """Returns a command that writes the same files in every run."""

        def named(here: Path) -> list[str]:
            return [argument.replace("HERE", str(here)) for argument in arguments]

        return Command(prepare, named, _files, _hidden, again)

    found = {
        "train": Command(
            lambda here: None, lambda here: [*train, f"--workdir={here / 'run'}"],
            lambda here: _trained(here / "run"), lambda here: litter(here / "run"),
        ),
        "evaluate": one(
            "brt.evaluate", "--workdir=HERE/run", "--split=test", "--json=HERE/test.json",
            prepare=in_copy(trained),
        ),
        "generate": one(
            "brt.generate", f"--workdir={trained}", "--prompt=ab", "--max_tokens=4",
            "--save_state=HERE/state.npz",
        ),
        "prepare": one(
            "brt.prepare", "--documents", *texts[1:], "--validation", texts[0],
            "--tokenizer", "bytes", "--output=HERE/data",
        ),
        "export": one(
            "brt.convert", "--from=brt", str(trained), "--to=hf", "HERE/exported", again=2
        ),
        "import": one(
            "brt.convert", "--from=hf", str(huggingface), "--to=brt", "HERE/imported", again=2
        ),
    }  # fmt: skip
    if "sweep" in names:
        arguments = ["brt.sweep", f"--gin_file={sweep}"]
        environment = dict(os.environ)
        os.environ.pop("LD_PRELOAD", None)  # No call fails in the processes of the points.
        assert (life := live([*arguments, f"--workdir={swept}"])).code == 0, life.said
        os.environ.update(environment)
        found["sweep"] = one(*arguments, "--workdir=HERE/run", prepare=in_copy(swept))
    return found


_GIN = """
Model.layers = 1
Recurrence.layers = ()
Model.model_dim = 8
Model.heads = 1
Model.head_dim = 8
Model.mlp_dim = 8
Model.window = 8
Training.segment_length = 16
Training.batch_size = 2
Training.gradient_accumulation = 1
Training.steps = 4
Training.log_every = 1
Training.evaluate_every = 0
Training.sample_every = 0
Training.probe_every = 0
Training.plots = False
Checkpoint.every = 2
Checkpoint.keep = 1
Evaluation.segment_length = 16
"""


def _configs(place: Path) -> tuple[Path, Path]:
    """Writes the config of a run and of a sweep; returns their .gin files.

    The run has four steps and saves at the second and the fourth. The sweep has two such runs.
    """
    from sharded_cases import text

    (place / "texts").mkdir(parents=True)
    for i, words in enumerate((60, 30, 10, 10)):
        (place / f"texts/{i}.txt").write_text(text(i, words))
    files = sorted(map(str, (place / "texts").glob("*.txt")))
    data = (
        f"Data.train = {files[:2]}\nData.validation = {files[2:3]}\nData.test = {files[3:]}\n"
        f"Data.cache_dir = '{place / 'cache'}'\n"
    )
    gin, sweep = place / "run.gin", place / "sweep.gin"
    gin.write_text(_GIN + data)
    sweep.write_text(f"include '{gin}'\nSweep.grid = {{'Training.seed': [0, 1]}}\n")
    return gin, sweep


# Files and texts that depend on the time or the place of a run, or on its messages.
_SPEED = re.compile(rb'"tokens_per_second": [0-9.e+]+|[0-9,]+ tokens per second')
_TIMELY = ("log.txt", "provenance.json", "metrics.jsonl", "heartbeat", "tensorboard", ".lock")


def _files(here: Path) -> dict[str, str]:
    return {
        str(path.relative_to(here)): hashlib.sha256(_SPEED.sub(b"", path.read_bytes())).hexdigest()
        for path in sorted(here.rglob("*"))
        if path.is_file() and not {*path.relative_to(here).parts} & {*_TIMELY}
    }


def _trained(run: Path) -> tuple[Any, ...]:
    """Returns the state hash, the metrics and the other files of a run, for comparison."""
    from tiny_runs import metrics, state_hash

    kept = {name: x for name, x in _files(run).items() if not name.startswith("checkpoints")}
    there = [name for name in _TIMELY if (run / name).exists()]
    return state_hash(run), metrics(run), kept, there


def _hidden(here: Path) -> list[str]:
    """Returns the temporary files that a command left in its directory."""
    ends = (".partial", ".deleted", ".tmp")
    return [str(path) for path in here.rglob("*") if path.name.endswith(ends)]


class Case(NamedTuple):
    """A call of the file system that fails while a command runs."""

    command: str
    kind: str
    n: int
    error: str
    sticky: bool

    def __str__(self) -> str:
        later = " and all later ones" if self.sticky else ""
        return f"{self.command}: {self.kind} {self.n}{later}: {self.error}"


class Driver:
    """Runs cases in a directory and reports what went wrong."""

    def __init__(self, place: Path, names: Sequence[str]):
        self._calls = Calls()
        self._place = place
        keep_compiled()
        found = commands(place / "shared", names)
        self._commands = {name: found[name] for name in names}
        gc.freeze()  # Later garbage collections need not search the cached objects.
        self.counts: dict[tuple[str, str], int] = {}
        self._whole: dict[str, Any] = {}
        self.codes: Counter[tuple[str, int]] = Counter()

    def measure(self, command: str, kinds: Sequence[str]) -> None:
        """Counts the calls of each kind that an undisturbed process makes."""
        for kind in kinds:
            here = self._fresh(command)
            with self._calls.armed(here, kind):
                life = live(self._commands[command].arguments(here))
            assert life.code == 0, life.said
            self.counts[command, kind] = self._calls.count
            self._whole.setdefault(command, self._commands[command].result(here))
            assert self._commands[command].result(here) == self._whole[command], command

    def strike(self, case: Case) -> list[str]:
        """Runs a case and returns a sentence for each thing that went wrong."""
        own, here = self._commands[case.command], self._fresh(case.command)
        error = SHORT if case.kind == "short" else getattr(errno, case.error)
        arguments = own.arguments(here)
        with self._calls.armed(here, case.kind, case.n, error, case.sticky):
            first = live(arguments)
        self.hit = self._calls.hit
        self.codes[case.command, first.code] += 1
        wrong = list(self._wrong_ending(case, here, first))
        wrong += _not_whole(here / "run/checkpoints")
        again = live(arguments)
        # If all calls failed after the result was complete, it could not be taken back.
        allowed = {own.again} if not first.code else {0, own.again} if case.sticky else {0}
        if again.code not in allowed:
            wrong.append(f"the next start ends with {again.code}: {again.said[-600:]}")
        else:
            wrong += self._wrong_result(case.command, here, "the next start: ")
            wrong += [f"left lying about: {own.litter(here)}"] * bool(own.litter(here))
        return wrong

    def _wrong_ending(self, case: Case, here: Path, life: Life) -> Iterator[str]:
        sentences = life.said.count("brt: error: ")
        if "Traceback" in life.said:
            yield f"a traceback: {life.said[-2000:]}"
        elif life.code == 0:
            # Warnings name temporary directories that could not be removed.
            but = [*map(Path, re.findall(r"^warning: (.+) cannot be removed: ", life.said, re.M))]
            if "the results are not stored in " in life.said:  # The run directory is read-only.
                but += [here / "run/evaluations", here / "run/plots"]
            yield from self._wrong_result(case.command, here, f"code 0: {life.said[-600:]}: ", but)
        elif life.code not in _codes(case, self.hit, life.said) or sentences != 1:
            yield f"code {life.code}, {sentences} sentences: {life.said[-600:]}"

    def _wrong_result(
        self, command: str, here: Path, when: str, but: Sequence[Path] = ()
    ) -> list[str]:
        """Compares the result of a command with that of an undisturbed run, except below `but`."""
        try:
            whole, found = self._whole[command], self._commands[command].result(here)
            for place in but:
                prefix = f"{place.relative_to(here)}/"
                whole, found = (
                    {name: x for name, x in result.items() if not name.startswith(prefix)}
                    for result in (whole, found)
                )
        except Exception as error:  # noqa: BLE001 - A result that cannot be read is lost.
            return [f"{when}cannot be read: {error!r}"]
        if found == whole:
            return []
        return [f"{when}another result: {_difference(whole, found)}"]

    def _fresh(self, command: str) -> Path:
        here = self._place / "case"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        self._commands[command].prepare(here)
        return here


def _codes(case: Case, hit: str, said: str) -> set[int]:
    """Returns the expected exit codes: those of failed storage, and also those of config and data
    if access is denied before a run begins, or if a file or directory cannot be created.
    """
    opens = hit.startswith(("open", "fopen", "mkdir"))
    begins = case.command == "train" and "compiling ..." not in said
    return {4, 2, 3} if case.error == "EACCES" and (opens or begins) else {4}


def _not_whole(checkpoints: Path) -> list[str]:
    from brt.checkpointing import manifest, reader

    steps = reader.steps(checkpoints) if checkpoints.is_dir() else []
    found = {step: manifest.verify(checkpoints / str(step)) for step in steps}
    return [
        f"checkpoint {step} counts and is not whole: {bad}" for step, bad in found.items() if bad
    ]


def _difference(wanted: Any, found: Any) -> str:
    if isinstance(wanted, dict):
        names = sorted({*wanted, *found})
        return str([name for name in names if wanted.get(name) != found.get(name)])
    if isinstance(wanted, tuple):
        pairs = zip(wanted, found, strict=True)
        return "; ".join(_difference(a, b) for a, b in pairs if a != b)
    return f"{str(found)[:300]} in place of {str(wanted)[:300]}"


def cases(
    counts: dict[tuple[str, str], int], passes: int, every: int, errors: Sequence[str],
    draw: random.Random,
) -> list[Case]:  # fmt: skip
    """Returns the cases: every n of each command and kind, once and with all later calls failing.

    Each of the `passes` over all calls gives a call another error. One case of `every` is drawn.
    """
    found = []
    for turn in range(passes):
        for (command, kind), count in counts.items():
            if kind == "short" and turn:
                continue  # A short write has no errors to choose from.
            for n in range(1, count + 1):
                for sticky in (False, True):
                    if draw.randrange(every) == 0:
                        error = "short" if kind == "short" else errors[(n + turn) % len(errors)]
                        found.append(Case(command, kind, n, error, sticky))
    return found


def run(args: argparse.Namespace) -> int:
    """Runs all cases that the flags select and prints each failure at once."""
    kinds, names = args.kinds.split(","), args.commands.split(",")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where syncing takes no time
    with tempfile.TemporaryDirectory(prefix="brt-calls-", dir=memory) as place:
        driver = Driver(Path(place).resolve(), names)
        for name in names:
            driver.measure(name, kinds)
        print(
            "calls of a life:", {f"{c} {k}": n for (c, k), n in driver.counts.items()}, flush=True
        )
        draw = random.Random(args.seed)
        found = cases(driver.counts, args.passes, args.every, args.errors.split(","), draw)
        begin, failed = time.monotonic(), 0
        tried = Counter()
        for number, case in enumerate(found):
            wrong = driver.strike(case)
            tried[case.command, case.kind] += bool(driver.hit)  # The number of calls varies.
            if wrong:
                failed += 1
                print(f"FAILED {case} ({driver.hit}): {' | '.join(wrong)}", flush=True)
            if number % 100 == 99:
                rate = (time.monotonic() - begin) / (number + 1)
                print(f"{number + 1} of {len(found)}, {rate:.2f} s each", flush=True)
        for (command, kind), count in tried.items():
            print(f"{command:<10} {kind:<10} {count:>6} of {driver.counts[command, kind]} calls")
        print("exit codes:", dict(driver.codes))
        print(f"{sum(tried.values())} of {len(found)} were hit, the others had ended before")
        print(f"CALLS {len(found)} cases, {len(found) - failed} survived, {failed} failed")
    return bool(failed)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--commands", default="train,evaluate,generate,prepare,export,import,sweep")
    flags.add_argument("--kinds", default=",".join(KINDS), help="of calls; any: all but short")
    flags.add_argument("--errors", default=",".join(ERRORS))
    flags.add_argument("--passes", type=int, default=1, help="5: every error at every n")
    flags.add_argument("--every", type=int, default=1, help="one n of so many, drawn; default all")
    flags.add_argument("--seed", type=int, default=0)
    return flags


def start(arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str] | None:
    """Runs this file in a process with the preloaded library; None if it cannot be compiled."""
    with tempfile.TemporaryDirectory() as place:
        library = build(Path(place))
        if library is None:
            return None
        environment = os.environ | {"LD_PRELOAD": str(library), LIBRARY: str(library)}
        command = [sys.executable, __file__, *arguments]
        return subprocess.run(command, env=environment, text=True, check=False, **options)


def main() -> int:
    args = parser().parse_args()
    if LIBRARY in os.environ:
        return run(args)
    done = start(sys.argv[1:])
    if done is None:
        print("left out: this machine is not Linux, or has no C compiler")
    return done.returncode if done else 0


if __name__ == "__main__":
    sys.exit(main())
