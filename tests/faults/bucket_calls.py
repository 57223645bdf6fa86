"""Makes the n-th request to a bucket fail, for every n of a short life of a run in a bucket.

python tests/faults/bucket_calls.py                             # all of it: an hour or two
python tests/faults/bucket_calls.py --kinds 403 --schemes gs --every 5

From the n-th request on, either the requests for its object fail, or all. Training must end with
exit code 4 or 2 and one sentence, or with 0 if its result is complete, as it must be if requests
are only slow. Every checkpoint whose manifest is in the bucket must be whole, and none may be lost.
If the command is run again, its result must be that of an undisturbed run. All cases share one
process, as in calls.py.
"""

import argparse
import hashlib
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import calls

from buckets import BucketServer, Fault, Request, environment  # isort: skip

FAULTS = {
    **{kind: Fault(kind) for kind in ("reset", "cut", "lost", "half")},
    "503": Fault(503),
    "403": Fault(403),
    "slow": Fault("delay", seconds=0.1),
    "stall": Fault("stall", seconds=1.5),  # longer than requests wait for an answer
}
_MANIFEST = re.compile(r"run/checkpoints/(\d+)/MANIFEST.sha256")


class Case(NamedTuple):
    scheme: str
    kind: str
    n: int
    all: bool

    def __str__(self) -> str:
        later = "all requests" if self.all else "its object"
        return f"{self.scheme}: {self.kind} from request {self.n} on, {later}"


class Driver:
    def __init__(self, place: Path, server: BucketServer):
        from brt.storage import lease, objects

        os.environ[objects._SILENCE[0]] = "1"
        objects._RETRIES = {"max_retries": 2, "initial_delay": "1ms", "max_delay": "2ms"}
        lease.LEASE_SECONDS = 5.0
        calls.keep_compiled()
        self._server = server
        self._gin = calls._configs(place)[0]
        self.whole: dict[str, Any] = {}
        self.codes: Counter[int] = Counter()

    def measure(self, scheme: str) -> int:
        """Returns the number of requests of an undisturbed life, and keeps its result."""
        self._server.buckets["bucket"].clear()
        begin = len(self._server.requests)
        life = self._live(scheme)
        assert life.code == 0, life.said
        count = len(self._server.requests) - begin
        self.whole[scheme] = self._result(scheme)
        return count

    def strike(self, case: Case) -> Iterator[str]:
        """Runs a case and yields a sentence for each thing that went wrong."""
        server, failing = self._server, []
        server.buckets["bucket"].clear()
        begin = len(server.requests)

        def fault(request: Request) -> Fault | None:
            what = request.operation, request.key
            if request.number - begin >= case.n and not failing:
                failing.append(what)
            return FAULTS[case.kind] if failing and (case.all or what in failing) else None

        server.faults = fault
        life = self._live(case.scheme)
        server.faults = []
        self.codes[life.code] += 1
        sentences = life.said.count("brt: error: ")
        if "Traceback" in life.said:
            yield f"a traceback: {life.said[-2000:]}"
        elif life.code == 0 and self._result(case.scheme) != self.whole[case.scheme]:
            yield f"code 0: another result: {life.said[-600:]}"
        elif life.code not in ((0,) if case.kind == "slow" else (0, 2, 4)) or sentences != bool(
            life.code
        ):
            yield f"code {life.code}, {sentences} sentences: {life.said[-600:]}"
        elif life.code and "disk" in life.said.partition("brt: error: ")[2]:
            yield f"a wrong remedy: {life.said[-600:]}"
        yield from self._not_whole()
        saved = max(self._steps(), default=0)
        again = self._live(case.scheme)
        if again.code or self._result(case.scheme) != self.whole[case.scheme]:
            yield f"the next start: {again.code}: {again.said[-600:]}"
        elif saved and f"from step {saved}" not in again.said:
            yield f"step {saved} is lost: {again.said[-600:]}"

    def _live(self, scheme: str) -> calls.Life:
        url = f"{scheme}://bucket/run"
        return calls.live(["brt.train", f"--gin_file={self._gin}", f"--workdir={url}"])

    def _steps(self) -> list[int]:
        return [int(m[1]) for key in self._server.buckets["bucket"] if (m := _MANIFEST.match(key))]

    def _not_whole(self) -> Iterator[str]:
        objects = self._server.buckets["bucket"]
        for step in self._steps():
            place = f"run/checkpoints/{step}/"
            for line in objects[f"{place}MANIFEST.sha256"].content[:].decode().splitlines():
                digest, _, name = line.partition("  ")
                stored = objects.get(place + name)
                if not stored or hashlib.sha256(stored.content[:]).hexdigest() != digest:
                    yield f"checkpoint {step} counts and lacks {name}"

    def _result(self, scheme: str) -> Any:
        from tiny_runs import metrics, state_hash

        from brt import storage

        path = Path(storage.local(f"{scheme}://bucket/run"))
        storage.of(path).fetch(path)
        # Old checkpoints stay if the run ends before it removes them, as on a disk.
        result = state_hash(path), metrics(path)
        storage.discard_all()
        return result


def run(args: argparse.Namespace) -> int:
    draw, failed, count = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="brt-requests-") as place, BucketServer() as server:
        os.environ |= environment(server) | {"XDG_CACHE_HOME": f"{place}/cache"}
        driver = Driver(Path(place).resolve(), server)
        for scheme in args.schemes.split(","):
            requests = driver.measure(scheme)
            print(f"{scheme}: {requests} requests", flush=True)
            for kind in args.kinds.split(","):
                for n in range(requests):
                    for everything in False, True:
                        if draw.randrange(args.every):
                            continue
                        case, count = Case(scheme, kind, n, everything), count + 1
                        if wrong := list(driver.strike(case)):
                            failed += 1
                            print(f"FAILED {case}: {' | '.join(wrong)}", flush=True)
                print(f"{scheme}, {kind}: {count} cases so far, {failed} failed", flush=True)
        print("exit codes:", dict(driver.codes))
    print(f"REQUESTS {count} cases, {count - failed} survived, {failed} failed")
    return bool(failed)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--schemes", default="gs,s3")
    flags.add_argument("--kinds", default=",".join(FAULTS))
    flags.add_argument("--every", type=int, default=1, help="one case of so many, drawn")
    flags.add_argument("--seed", type=int, default=0)
    return flags


if __name__ == "__main__":
    sys.exit(run(parser().parse_args()))
