"""Coordinates the processes of a run: how they connect, agree, and learn that one has ended.

JAX runs a key-value service for short texts in process 0. Everything that processes agree on goes
through `gather`, which raises an error if a process has announced its end or has died.

A collective operation would wait for a dead process for ever. Each process therefore publishes a
counter every second, its heartbeat, and exits if the counter of another process does not change for
a long time.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from brt import durable, output, runtime, storage
from brt.errors import ConfigError, PeerError

HEARTBEAT_SECONDS = 30  # A process is considered dead after this many seconds without a heartbeat.
# After a process has announced its end, the other processes have this many seconds to end by
# themselves.
GRACE_SECONDS = 15
_BEAT_SECONDS = 1.0


class Heartbeat:
    """Threads that publish this process's heartbeat and watch the heartbeats of other processes.

    This process exits if the heartbeat of another process stops. `client` is the client of JAX's
    key-value service. The function `peer` takes the index of a process, and returns the name that
    messages give to the process.
    """

    # Returns the current activity of this process, such as "stepping after step 3", which the other
    # processes mention in their messages.
    doing: Callable[[], str] = str

    def __init__(self, client: Any, index: int, count: int, peer: Callable[[int], str]):
        self._client, self._index, self._peer = client, index, peer
        self._beats, self._over = 0, False
        self._seen = dict.fromkeys(range(count), ("", time.monotonic()))
        self._stopped: dict[int, str] = {}
        self._threads = contextlib.ExitStack()
        # The watch has a thread of its own, because the requests that a beat sends to process 0 do
        # not return while process 0 is suspended.
        for work in (self._beat, self._watch):
            self._threads.enter_context(runtime.repeating(work, _BEAT_SECONDS, "heartbeat"))

    def last_activities(self) -> list[str]:
        """Returns phrases such as "process 1 of 2 was stepping after step 3"."""
        return [
            f"{self._peer(index)} was {activity}"
            for index, (beat, _) in self._seen.items()
            if index != self._index and (activity := _doing(beat))
        ]

    def close(self) -> None:
        """Stops the threads, so that this process no longer exits when another process ends."""
        self._over = True
        # This call waits for the threads, because Python aborts if it exits while a thread is
        # inside the code of the key-value service (see `runtime.leave`).
        self._threads.close()

    def _beat(self) -> None:
        self._beats += 1
        try:
            activity = f"{self._beats} {self.doing()}"
            self._client.key_value_set(f"brt/alive/{self._index}", activity, True)
            alive = _entries(self._client, "brt/alive")
            self._stopped = _entries(self._client, "brt/stopped")
        except Exception:
            # Process 0 has ended, and the key-value service has ended with it. The method
            # `_watch` will notice this.
            return
        for index in alive.keys() - {self._index}:
            if alive[index] != self._seen[index][0]:
                self._seen[index] = alive[index], time.monotonic()

    def _watch(self) -> None:
        for index, (beat, last_time) in sorted(self._seen.items()):
            silent = time.monotonic() - last_time
            reason = self._stopped.get(index)
            # If a process other than 0 has not published its first heartbeat, it may still be
            # starting. The next call of `gather` notices if it is dead.
            if index == self._index or not (beat or index == 0):
                continue
            if silent > (GRACE_SECONDS if reason else HEARTBEAT_SECONDS):
                self._end(index, silent, reason)

    def _end(self, index: int, silent: float, reason: str | None) -> None:
        if self._over:
            return
        activity = _doing(self._seen[index][0])
        last = f", last while {activity}" * bool(activity)
        why = f"has given no sign of life for {silent:.0f} s{last}"
        why = f"has stopped: {reason}" if reason else why
        output.say(
            f"brt: {self._peer(index)} {why}; start all processes again to continue from the "
            "newest checkpoint"
        )
        os._exit(PeerError.exit_code)


def _entries(client: Any, place: str) -> dict[int, str]:
    """Returns the texts published below the key `place`, with indices of processes as keys."""
    entries = client.key_value_dir_get(place)
    return {int(key.rpartition("/")[2]): value for key, value in entries}


def _doing(beat: str) -> str:
    return beat.partition(" ")[2]


RENDEZVOUS_SECONDS = 300  # All processes must connect within this many seconds.
# A process waits at most this many seconds for another process that compiles or reads data.
PATIENCE_SECONDS = 1800
# At the end, process 0 waits at most this many seconds for the other processes to disconnect.
_LEAVING_SECONDS = 10
_POLL_MILLISECONDS = 500
_APPEARING_SECONDS = 10.0
# If the flags leave out values that the environment does not provide either, JAX raises an error
# within this many seconds.
_AT_ONCE_SECONDS = 2
# If another process does not answer, the errors of collective operations and of the key-value
# service contain one of these words.
_LOST = re.compile(r"gloo|connection|socket|unavailable|deadline|heartbeat|peer|aborted", re.I)


class Launch(NamedTuple):
    """The command line flags that say which of several processes this process is.

    The first three flags are None if there is only one process, or if the environment of a cluster
    provides their values.
    """

    coordinator_address: str | None = None  # "HOST:PORT" of process 0
    process_count: int | None = None
    process_index: int | None = None  # counted from 0
    # True if there are several processes and the environment provides the other values. In jobs of
    # SLURM, Open MPI and TPUs, this is noticed without the flag.
    distributed: bool = False


def start(launch: Launch) -> None:
    """Connects this process to the other processes of the run and starts the heartbeat.

    The function does nothing if the process is the only one. It must be called before any use of
    devices. PeerError is raised if not all processes connect in time.
    """
    flags = launch[:3]
    if any(flag is not None for flag in flags):
        _check(launch)
    elif not (launch.distributed or _cluster()):
        return
    address, count, index = flags
    # By default, JAX aborts a process if another process ends. This option prevents the abort.
    if "jax_enable_recoverability" in jax.config.values:
        jax.config.update("jax_enable_recoverability", True)
    # If a process is missing, JAX aborts all others without a message. The timer ends this process
    # earlier, with a message.
    began = time.monotonic()

    def end_without_peers() -> None:
        output.say(f"brt: {_missed(launch, RENDEZVOUS_SECONDS)}")
        os._exit(PeerError.exit_code)

    timer = threading.Timer(RENDEZVOUS_SECONDS, end_without_peers)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            address, count, index, initialization_timeout=RENDEZVOUS_SECONDS + 60,
            # JAX's heartbeat aborts the process without a clear message. It therefore gets twice
            # the time of brt's heartbeat, which ends the process earlier, with a message.
            heartbeat_timeout_seconds=2 * HEARTBEAT_SECONDS, shutdown_timeout_seconds=30,
        )  # fmt: skip
    except Exception as error:  # Libraries such as kubernetes raise errors of their own classes.
        seconds, network = time.monotonic() - began, jax.errors.JaxRuntimeError | OSError
        said = f"JAX says: {type(error).__name__}: {_first_line(error)}"
        if isinstance(error, network) or seconds > _AT_ONCE_SECONDS:
            raise PeerError(f"{_missed(launch, seconds)}; {said}") from error
        who = "--distributed" if launch.distributed else "a cluster"
        raise ConfigError(
            f"{who} takes the processes from what srun (SLURM_PROCID), mpirun "
            "(OMPI_COMM_WORLD_RANK), Kubernetes (KUBERNETES_SERVICE_HOST) or TPUs "
            "(TPU_WORKER_HOSTNAMES) put into the environment, which is not complete; start it "
            "there, or with --coordinator_address=HOST:PORT --process_count=N --process_index=I; "
            f"{said}"
        ) from error
    finally:
        timer.cancel()
    _hosts[:] = gather("host", socket.gethostname())
    if _is_loopback(address) and len(set(_hosts)) > 1:
        raise ConfigError(
            f"--coordinator_address={address} can be reached only from its own host, but the "
            f"processes are on {', '.join(sorted(set(_hosts)))}; name process 0's host"
        )
    global heartbeat
    heartbeat = Heartbeat(service(), jax.process_index(), jax.process_count(), peer)


def _check(launch: Launch) -> None:
    address, count, index, _ = launch
    if address is None or count is None or index is None:
        raise ConfigError(
            "--coordinator_address=HOST:PORT, --process_count=N and --process_index=I go together; "
            "a cluster that provides them needs none of them"
        )
    if not 0 <= index < count:
        raise ConfigError(
            f"--process_index={index} must be one of 0 to {count - 1} (--process_count={count})"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--coordinator_address={address} must be HOST:PORT")
    hosts = int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
    if _is_loopback(address) and hosts > 1:
        raise ConfigError(
            f"--coordinator_address={address} can be reached only from its own host, but this job "
            f"has {hosts} hosts; name process 0's host"
        )


def _is_loopback(address: str | None) -> bool:
    host = (address or "").rpartition(":")[0]
    return host.startswith(("localhost", "127.", "[::1]", "::1"))


def _cluster() -> bool:
    """Returns True if environment variables say that this is one of several processes."""
    names = "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"
    counts = (os.environ.get(name, "") for name in names)
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return any(n.isdecimal() and int(n) > 1 for n in counts) or "," in hosts


def _missed(launch: Launch, seconds: float) -> str:
    address, count, index, _ = launch
    who = "this process" if index is None else f"process {index} of {count}"
    where = f"at {address}" if address else "as the environment says"
    return (
        f"{who} did not find all others {where} within {seconds:.0f} s; "
        "check that all of them run, that process 0 can be reached from here, and that all were "
        "started with the same --process_count"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]


def several() -> bool:
    return jax.process_count() > 1


def is_first() -> bool:
    """Returns True in process 0, the process that writes the files which a run has only once."""
    return jax.process_index() == 0


def service() -> Any:
    """Returns the client of JAX's key-value service for short texts; None for a single process."""
    # JAX has no public interface to its key-value service.
    from jax._src import distributed

    return distributed.global_state.client


heartbeat: Heartbeat | None = None  # None for a single process
_rounds: dict[str, int] = {}  # maps each name to the number of calls of `gather` with this name
_hosts: list[str] = []  # the host of each process, in the order of the processes' indices


def peer(index: int) -> str:
    """Returns the name that messages give to a process, such as "process 1 of 4 on host-b"."""
    host = f" on {_hosts[index]}" if index < len(_hosts) else ""
    return f"process {index} of {jax.process_count()}{host}"


def gather(name: str, text: str) -> list[str]:
    """Returns the texts that all processes pass under a name, ordered by the index of the process.

    The call waits until all processes have called the function with this name. PeerError is raised
    if a process has stopped, or does not call the function within PATIENCE_SECONDS.
    """
    if not several():
        return [text]
    _rounds[name] = _rounds.get(name, 0) + 1
    place, client = f"brt/{name}/{_rounds[name]}", service()
    client.key_value_set(f"{place}/{jax.process_index()}", text)
    end = time.monotonic() + PATIENCE_SECONDS
    return [_waited(client, place, index, end) for index in range(jax.process_count())]


def _waited(client: Any, place: str, index: int, end: float) -> str:
    while True:
        try:
            return client.blocking_key_value_get(f"{place}/{index}", _POLL_MILLISECONDS)
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise PeerError(f"the run's coordinator is gone ({_first_line(error)})") from error
        _refuse_if_stopped(client)
        if time.monotonic() > end:
            raise PeerError(
                f"{peer(index)} did not reach {place.split('/')[1]!r} in time; check whether it "
                "hangs, and start all processes again"
            )


def _refuse_if_stopped(client: Any) -> None:
    for index, reason in _entries(client, "brt/stopped").items():
        if index != jax.process_index():
            raise PeerError(f"{peer(index)} has stopped: {reason}")


def announce_end(reason: str) -> None:
    """Tells the other processes why this process ends early, so that they do not wait for it."""
    if several():
        # Errors are ignored: if the key-value service is gone, other processes cannot be told.
        with contextlib.suppress(Exception):
            service().key_value_set(f"brt/stopped/{jax.process_index()}", reason[:500])


def wait_for_all(name: str) -> None:
    gather(name, "")


def from_first(value: Any, name: str = "decision") -> Any:
    """Returns, on all processes, the JSON value that process 0 passes under this name."""
    return json.loads(gather(name, json.dumps(value))[0])


def check_same(facts: Mapping[str, str]) -> None:
    """Raises ConfigError on all processes if they have different values under a name in `facts`.

    The message has the name, such as "config" or "versions", and the first line in which the values
    differ.
    """
    first, *others = (json.loads(text) for text in gather("facts", json.dumps(dict(facts))))
    for index, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] == value:
                continue
            pairs = zip(value.splitlines(), other[name].splitlines(), strict=False)
            ends = value[-80:], other[name][-80:]
            a, b = next(((a, b) for a, b in pairs if a != b), ends)
            raise ConfigError(
                f"{peer(index)} has a different {name} than process 0: {b.strip()[:120]!r}, not "
                f"{a.strip()[:120]!r}; start all processes in the same way"
            )


def check_shared(directory: Any) -> None:
    """Raises ConfigError on all processes unless all see the same files in a directory.

    For the check, process 0 writes a file to the directory and removes the file again.
    """
    name = from_first(f"shared_{secrets.token_hex(8)}", "shared")
    place = storage.of(directory)
    if is_first():
        durable.open_file(directory / name, "x").close()
        place.publish()
    wait_for_all("shared mark")
    place.refresh()
    # Network file systems may show the file late.
    end = time.monotonic() + _APPEARING_SECONDS
    while not (seen := (directory / name).exists()) and time.monotonic() < end:
        time.sleep(0.1)
    answers = gather("shared seen", str(seen))
    missing = [peer(index) for index, answer in enumerate(answers) if answer != "True"]
    if is_first():
        (directory / name).unlink(missing_ok=True)
        place.removed(directory / name)
    if missing:
        raise ConfigError(
            f"{directory} is not the same directory for all processes: {', '.join(missing)} "
            "cannot see what process 0 writes there; put --workdir in a bucket or on a shared "
            "file system"
        )


def _leave() -> None:
    """Disconnects this process. Process 0 only waits until the others have disconnected.

    It waits because the others need the key-value service to disconnect, and the service ends with
    process 0.
    """

    def wait_for_others() -> None:  # It may never return if a process hangs.
        with contextlib.suppress(Exception):
            service().get_live_nodes(list(range(jax.process_count())))

    if is_first():
        gone = threading.Thread(target=wait_for_others, daemon=True)
        gone.start()
        runtime.join(gone, _LEAVING_SECONDS)
    else:
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()


@contextlib.contextmanager
def explain_peer_errors() -> Iterator[None]:
    """Context that raises PeerError if a collective operation fails because another process ended.

    If this process fails inside the context, it tells the other processes. At the end of the
    context, this process disconnects from the other processes. Process 0 waits instead until the
    others have disconnected.
    """
    try:
        yield
    except PeerError:
        raise
    except BaseException as error:
        if several():
            announce_end(f"{type(error).__name__}: {_first_line(error)}")
            if isinstance(error, jax.errors.JaxRuntimeError) and _LOST.search(str(error)):
                with contextlib.suppress(Exception):
                    _refuse_if_stopped(service())
                raise PeerError(
                    f"another process or the network has failed: {_first_line(error)}; start all "
                    "processes again to continue from the newest checkpoint"
                ) from error
        raise
    finally:
        if heartbeat:
            heartbeat.close()
            _leave()


class AgreedRequest:
    """A request to one process, such as to stop, that all processes carry out at the same step.

    Every process calls `reason_if_due` equally often, for example once per step. The process that
    receives a request publishes the request. A thread of each process then publishes how often its
    process has called `reason_if_due`. If the largest of these numbers is n, all processes carry
    out the request at their call number n + 1. They call `done` afterwards, and then another
    request may follow.

    The `name` of the request must be equal on all processes. `requester` returns a phrase about who
    or what has made the request to this process, such as the name of a signal; None if there is no
    request. `announce` is called with the reason if the request was made to another process.
    """

    def __init__(
        self, name: str, requester: Callable[[], str | None], announce: Callable[[str], object]
    ):
        self._name, self._requester, self._announce = name, requester, announce
        self._lock, self._agreed = threading.Lock(), threading.Event()
        self._done = threading.Event()
        self._calls, self._frozen, self._last_call = 0, False, sys.maxsize
        self.reason: str | None = None
        self._lost: PeerError | None = None
        self._over = False
        self._thread = threading.Thread(target=self._watch, name=f"agreement: {name}", daemon=True)
        if several():
            self._thread.start()

    def reason_if_due(self) -> str | None:
        """Returns the reason of the request if this process must carry it out now; otherwise None.

        All processes must call the method equally often, because they agree on the call at which to
        act. PeerError is raised if another process does not answer. If there is only one process,
        it acts at once.
        """
        if not self._thread.ident:
            return self._requester()
        with self._lock:
            waits = self._frozen
            if not waits:
                self._calls += 1
        if waits:
            self._agreed.wait(PATIENCE_SECONDS)
            with self._lock:
                self._calls += 1
        if self._lost is not None:
            raise self._lost
        return self.reason if self._calls > self._last_call else None

    def done(self) -> None:
        """Marks the request as carried out, so that another request can be made."""
        with self._lock:
            self._frozen, self._last_call, self.reason = False, sys.maxsize, None
            self._agreed.clear()
        self._done.set()

    def close(self) -> None:
        """Stops the thread; `reason_if_due` must not be called any more."""
        self._over = True
        self._done.set()
        # The thread is waited for, because Python aborts if it exits while a thread is inside the
        # code of the key-value service (see `runtime.leave`).
        if self._thread.ident:
            runtime.join(self._thread)

    def _watch(self) -> None:
        number = 0
        while (reason := self._wait_for_request(f"brt/asked/{self._name}/{number}")) is not None:
            self._agree(reason)
            if self._lost is not None:
                return
            self._done.wait()
            self._done.clear()
            number += 1

    def _wait_for_request(self, place: str) -> str | None:
        """Waits for a request to any process and returns its reason; None after `close`."""
        texts, published = service(), False
        while not self._over:
            if (request := self._requester()) and not published:
                published = True
                # The key-value service raises an error if another process has already published a
                # request. The error is ignored, because only the first request counts.
                with contextlib.suppress(Exception):
                    texts.key_value_set(place, f"{request} to {peer(jax.process_index())}")
            try:
                reason = texts.blocking_key_value_get(place, 200)
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                return None
            if not published:
                self._announce(reason)
            return reason
        return None

    def _agree(self, reason: str) -> None:
        """Agrees with the other processes on the call of `reason_if_due` at which all act."""
        with self._lock:
            self._frozen = True
            calls = self._calls
        try:
            self._last_call = max(int(n) for n in gather(self._name, str(calls)))
            self.reason = reason
        # The error is stored, so that the next call of `reason_if_due` raises it in the thread of
        # the caller.
        except PeerError as error:
            self._lost = error
        finally:
            self._agreed.set()
