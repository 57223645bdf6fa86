"""Agreement of several processes on the step at which all processes do something, such as stop."""

import contextlib
import sys
import threading
from collections.abc import Callable

import jax

from brt import hanging
from brt.distributed.heartbeat import JOIN_SECONDS
from brt.distributed.processes import PATIENCE_SECONDS, gather, peer, service
from brt.errors import PeerError


class AgreedRequest:
    """A request to one process, such as a signal to stop, that all carry out at the same step.

    Every process calls `reason_if_due` equally often, for example once per step. The process that
    receives a request publishes the request. A thread of each process then publishes how often its
    process has called `reason_if_due`. If the largest of these numbers is n, all processes carry
    out the request at their call number n + 1. They call `done` afterwards, and then another
    request may follow.

    Args:
      name: the name of the request, which must be equal on all processes.
      requester: returns a phrase about who or what has made the request to this process, such as
        the name of a signal; None if there is no request.
      announce: called with the reason if the request was made to another process.
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
        self._thread.start()

    def reason_if_due(self) -> str | None:
        """Returns the reason of the request if this process must carry it out now; otherwise None.

        All processes must call the method equally often. PeerError is raised if one does not
        answer.
        """
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
        # Python aborts if it exits while a thread is inside the code of the key-value service (see
        # `hanging.leave`).
        hanging.join(self._thread, JOIN_SECONDS)

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
