"""When several processes stop, or do anything else that one of them is asked for."""

import contextlib
import sys
import threading
from collections.abc import Callable

import jax

from brt.distributed.heartbeat import JOIN_SECONDS
from brt.distributed.processes import PATIENCE_SECONDS, gather, peer, service
from brt.errors import PeerError


class Agreed:
    """One process is asked for something, and all do it at the same look.

    Every process looks as often as the others (`due`). Who is asked says so; a thread of each
    then tells the others how far its process has looked, and the furthest is where all do it.
    What is over (`done`, on all of them at the same look) may be asked for again.

    Args:
      name: of what is asked for.
      asked: what asks this process, None before it.
      announce: told why this process will do it, where another one was asked.
    """

    def __init__(
        self, name: str, asked: Callable[[], str | None], announce: Callable[[str], object]
    ):
        self._name, self._asked, self._announce = name, asked, announce
        self._lock, self._agreed = threading.Lock(), threading.Event()
        self._done = threading.Event()
        self._looks, self._frozen, self._at = 0, False, sys.maxsize
        self.reason: str | None = None
        self._lost: PeerError | None = None
        self._over = False
        self._thread = threading.Thread(target=self._watch, name=f"agreement: {name}", daemon=True)
        self._thread.start()

    def due(self) -> str | None:
        """Why to do it here, None: go on.

        Raises:
          PeerError: a process did not say how far it is.
        """
        with self._lock:
            waits = self._frozen
            if not waits:
                self._looks += 1
        if waits:
            self._agreed.wait(PATIENCE_SECONDS)
            with self._lock:
                self._looks += 1
        if self._lost is not None:
            raise self._lost
        return self.reason if self._looks > self._at else None

    def done(self) -> None:
        """It is over, and whatever asked for it is gone."""
        with self._lock:
            self._frozen, self._at, self.reason = False, sys.maxsize, None
            self._agreed.clear()
        self._done.set()

    def close(self) -> None:
        """No process looks any more.

        Python aborts where it ends while a thread is within the service's code.
        """
        self._over = True
        self._done.set()
        self._thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        number = 0
        while (reason := self._heard(f"brt/asked/{self._name}/{number}")) is not None:
            self._settle(reason)
            if self._lost is not None:
                return
            self._done.wait()
            self._done.clear()
            number += 1

    def _heard(self, place: str) -> str | None:
        """Why this process, or another one, is asked; None: nobody will be any more."""
        texts, told = service(), False
        while not self._over:
            if (asked := self._asked()) and not told:
                told = True
                with contextlib.suppress(Exception):  # another one was faster
                    texts.key_value_set(place, f"{asked} to {peer(jax.process_index())}")
            try:
                reason = texts.blocking_key_value_get(place, 200)
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                return None
            if not told:
                self._announce(reason)
            return reason
        return None

    def _settle(self, reason: str) -> None:
        with self._lock:
            self._frozen = True
            looks = self._looks
        try:
            self._at = max(int(n) for n in gather(self._name, str(looks)))
            self.reason = reason
        except PeerError as error:  # told at the next look; who has ended looks no more
            self._lost = error
        finally:
            self._agreed.set()
