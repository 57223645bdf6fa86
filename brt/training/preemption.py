"""Turns SIGTERM and Ctrl-C into a request to stop training after the current step."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from brt import output
from brt.errors import Preempted

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
QUIT_AT_ONCE = 130  # the exit code that shells report if Ctrl-C has ended a program


def _announce(message: str) -> None:
    output.say("")  # The terminal may show ^C in the present line.
    output.say(message)


@contextlib.contextmanager
def stop_at_once() -> Iterator[None]:
    """Context in which SIGTERM raises Preempted in the main thread.

    Commands use this context outside of training, where there is nothing to save.
    """

    def stop(*_: object) -> None:
        raise Preempted("SIGTERM: stopped outside of training; run the same command again")

    old = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


class StopSignal:
    """Context in which the first signal requests a stop, and a later Ctrl-C quits at once.

    A thread answers the signals. Python's own handlers would run only when the main thread returns
    from compiling or computing, which may take minutes. If the context is entered outside of the
    main thread, where Python cannot catch signals, the context does nothing.

    `announce` is called with a message for the user about what happens next, in the thread that
    answers the signals or that calls `request`.
    `uninterruptible` returns the name of the current phase, such as "compiling", if the phase has
    to end before the run can stop, and "" if not.
    """

    def __init__(
        self,
        announce: Callable[[str], None] = _announce,
        uninterruptible: Callable[[], str] = str,
    ):
        self._announce, self._uninterruptible = announce, uninterruptible
        self._requested: str | None = None

    @property
    def requested(self) -> str | None:
        """The first signal, such as "SIGTERM", or another reason to stop; None before a request."""
        return self._requested

    def request(self, reason: str) -> None:
        """Requests a stop as a signal does; any thread may call it."""
        if self._requested is None:
            self._requested = reason
            after = f", after {phase}" if (phase := self._uninterruptible()) else ""
            self._announce(
                f"{reason}: saving at the next step boundary{after} (Ctrl-C quits at once)"
            )

    def __enter__(self) -> "StopSignal":
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._old_wakeup = signal.set_wakeup_fd(
                self._writer.fileno(), warn_on_full_buffer=False
            )
            self._old_handlers = {
                number: signal.signal(number, lambda *_: None) for number in _SIGNALS
            }
            self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._old_wakeup)
            self._writer.close()  # This ends the thread, which reads from the other end.
            self._thread.join()
            self._reader.close()

    def _watch(self) -> None:
        # Python writes the number of each signal to the other end of the socket, as
        # `signal.set_wakeup_fd` has requested.
        while received := self._reader.recv(1):
            if received[0] not in _SIGNALS:
                continue
            if self._requested is None:
                self.request(signal.Signals(received[0]).name)
            elif received[0] == signal.SIGINT:
                self._announce("SIGINT: quitting without saving")
                os._exit(QUIT_AT_ONCE)
