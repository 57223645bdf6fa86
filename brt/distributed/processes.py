"""Several processes that are one run: how they find each other, agree, and learn of an end.

JAX gives them a service for small texts by name; all that they agree on goes through `gather`,
which never waits for a process that has said goodbye or is gone.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from brt import durable
from brt.distributed.heartbeat import HEARTBEAT_SECONDS, Heartbeat
from brt.errors import ConfigError, PeerError

RENDEZVOUS_SECONDS = 300  # to find each other
PATIENCE_SECONDS = 1800  # where one compiles or reads and the others have done so
_LEAVING_SECONDS = 10  # after the end, for the others
_POLL_MILLISECONDS = 500
# What collectives and the service say where somebody does not answer.
_LOST = re.compile(r"gloo|connection|socket|unavailable|deadline|heartbeat|peer|aborted", re.I)
_LOOPBACK = ("localhost", "127.", "[::1]", "::1")


class Launch(NamedTuple):
    """How this process is one of several; all None: it stands alone, or its cluster says so."""

    coordinator_address: str | None = None
    process_count: int | None = None
    process_index: int | None = None
    distributed: bool = False


def start(launch: Launch) -> None:
    """Finds the other processes, if there are any; before anything asks for devices.

    Raises:
      ConfigError: flags that cannot work.
      PeerError: the others did not come.
    """
    flags = launch[:3]
    if any(flag is not None for flag in flags):
        _check(launch)
    elif not (launch.distributed or _cluster()):
        return
    address, count, index = flags
    if "jax_enable_recoverability" in jax.config.values:  # else it aborts where a process is gone
        jax.config.update("jax_enable_recoverability", True)
    # JAX would abort where nobody comes: it gets more time than we have patience.
    patience = threading.Timer(RENDEZVOUS_SECONDS, _nobody_came, [launch])
    patience.daemon = True
    patience.start()
    try:
        jax.distributed.initialize(
            address, count, index, initialization_timeout=RENDEZVOUS_SECONDS + 60,
            # JAX aborts without a sentence of ours, so ours comes first.
            heartbeat_timeout_seconds=2 * HEARTBEAT_SECONDS, shutdown_timeout_seconds=30,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise PeerError(f"{_missed(launch)}; JAX says: {_first_line(error)}") from error
    finally:
        patience.cancel()
    _exchange_hosts(address)
    global _heartbeat
    _heartbeat = Heartbeat(service(), jax.process_index(), jax.process_count(), peer)


def _check(launch: Launch) -> None:
    address, count, index, _ = launch
    if address is None or count is None or index is None:
        raise ConfigError(
            "--coordinator_address=HOST:PORT, --process_count=N and --process_index=I go together; "
            "a cluster that says them itself needs none of them"
        )
    if not 0 <= index < count:
        raise ConfigError(
            f"--process_index={index} must be one of 0 to {count - 1} (--process_count={count})"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--coordinator_address={address} must be HOST:PORT")
    hosts = int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
    if host.startswith(_LOOPBACK) and hosts > 1:
        raise ConfigError(
            f"--coordinator_address={address} can be reached from its own host only, but this job "
            f"has {hosts}; name process 0's host"
        )


def _cluster() -> bool:
    """Whether the environment is that of one of several processes."""
    names = "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"
    counts = (os.environ.get(name, "") for name in names)
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return any(n.isdecimal() and int(n) > 1 for n in counts) or "," in hosts


def _missed(launch: Launch) -> str:
    address, count, index, _ = launch
    where = f"at {address}" if address else "by what the environment says"
    return (
        f"{_named(index, count)} did not find all others {where} within {RENDEZVOUS_SECONDS} s; "
        "see that all of them run, that process 0 can be reached from here, and that all were "
        "started with the same --process_count"
    )


def _nobody_came(launch: Launch) -> None:
    print(f"brt: {_missed(launch)}", file=sys.stderr, flush=True)
    os._exit(PeerError.exit_code)


def _named(index: int | None, count: int | None) -> str:
    return "this process" if index is None else f"process {index} of {count}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]


def several() -> bool:
    """Whether there are other processes."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def service() -> Any:
    """What keeps texts by name, and has all processes see them."""
    from jax._src import distributed  # there is no public way to the service's texts

    return distributed.global_state.client


_heartbeat: Heartbeat | None = None
_rounds: dict[str, int] = {}
_hosts: list[str] = []


def _exchange_hosts(address: str | None) -> None:
    _hosts[:] = gather("host", socket.gethostname())
    host = (address or "").rpartition(":")[0]
    if host.startswith(_LOOPBACK) and len(set(_hosts)) > 1:
        raise ConfigError(
            f"--coordinator_address={address} can be reached from its own host only, but the "
            f"processes are on {', '.join(sorted(set(_hosts)))}; name process 0's host"
        )


def peer(index: int) -> str:
    """A process as people know it."""
    host = f" on {_hosts[index]}" if index < len(_hosts) else ""
    return f"process {index} of {jax.process_count()}{host}"


def gather(name: str, text: str) -> list[str]:
    """What every process says under a name, in the order of the processes.

    Raises:
      PeerError: one of them has stopped, or says nothing for PATIENCE_SECONDS.
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
                f"{peer(index)} did not come to {place.split('/')[1]!r} in time; see whether it "
                "hangs, and start all processes again"
            )


def _refuse_if_stopped(client: Any) -> None:
    for key, reason in client.key_value_dir_get("brt/stopped"):
        index = int(key.rpartition("/")[2])
        if index != jax.process_index():
            raise PeerError(f"{peer(index)} has stopped: {reason}")


def say_goodbye(reason: str) -> None:
    """Tells the others, who would wait, that this process ends before its time."""
    if several():
        with contextlib.suppress(Exception):  # they may be gone, too
            service().key_value_set(f"brt/stopped/{jax.process_index()}", reason[:500])


def tell(doing: Callable[[], str]) -> None:
    """Lets the others know what this process does, for when they hear of it no more."""
    if _heartbeat:
        _heartbeat.doing = doing


def last_words() -> list[str]:
    """What the other processes did when they were last heard of, a phrase each."""
    return _heartbeat.last_words() if _heartbeat else []


def wait_for_all(name: str) -> None:
    """Returns when all processes are here."""
    gather(name, "")


def of_first(value: Any, name: str = "decision") -> Any:
    """What process 0 has, JSON, on all of them."""
    return json.loads(gather(name, json.dumps(value))[0])


def check_same(facts: Mapping[str, str]) -> None:
    """Raises ConfigError on all processes where one has another fact, which is named."""
    everyone = [json.loads(text) for text in gather("facts", json.dumps(dict(facts)))]
    for index, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise ConfigError(
                    f"{peer(index)} has another {name} than process 0: "
                    f"{_difference(value, theirs[name])}; start all processes alike"
                )


def _difference(first: str, other: str) -> str:
    """The first lines that two texts do not share."""
    pairs = zip(first.splitlines(), other.splitlines(), strict=False)
    a, b = next(((a, b) for a, b in pairs if a != b), (first[-80:], other[-80:]))
    return f"{b.strip()[:120]!r}, not {a.strip()[:120]!r}"


def check_shared(directory: Any) -> None:
    """Raises ConfigError where the processes do not see each other's files in a directory."""
    name = of_first(durable.partial_name(), "shared")
    if is_first():
        durable.open_file(directory / name, "x").close()
    wait_for_all("shared mark")
    seen = _appears(directory / name)
    answers = gather("shared seen", str(seen))
    missing = [peer(index) for index, answer in enumerate(answers) if answer != "True"]
    if is_first():
        (directory / name).unlink(missing_ok=True)
    if missing:
        raise ConfigError(
            f"{directory} is not the same directory for all processes: {', '.join(missing)} "
            "cannot see what process 0 writes there; put --workdir on a shared file system"
        )


def _appears(path: Any, seconds: float = 10.0) -> bool:
    """Network file systems take their time."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _leave() -> None:
    """Process 0 keeps the service, without which the others abort: it goes last."""
    if is_first():
        gone = threading.Thread(target=_wait_for_others_to_leave, daemon=True)
        gone.start()
        gone.join(_LEAVING_SECONDS)
    else:
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()


def _wait_for_others_to_leave() -> None:
    """Who leaves is alive no more, and who is alone need not wait; who hangs never does either."""
    with contextlib.suppress(Exception):
        service().get_live_nodes(list(range(jax.process_count())))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """What collectives raise when a peer is gone becomes a sentence; who fails says so.

    Within, the others have to be there; behind it each goes its way.
    """
    try:
        yield
    except PeerError:
        raise
    except BaseException as error:
        if several():
            say_goodbye(f"{type(error).__name__}: {_first_line(error)}")
            if isinstance(error, jax.errors.JaxRuntimeError) and _LOST.search(str(error)):
                with contextlib.suppress(Exception):
                    _refuse_if_stopped(service())
                raise PeerError(
                    f"another process is gone, or the network between them: {_first_line(error)}; "
                    "start all processes again to go on from the newest checkpoint"
                ) from error
        raise
    finally:
        if _heartbeat:
            _heartbeat.close()
            _leave()
