"""Progress of an evaluation: a bar on a terminal, and otherwise a line per minute."""

import contextlib
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from brt import output

LINE_SECONDS = 60.0  # If stderr is not a terminal, at least this time passes between two lines.


@contextlib.contextmanager
def display(total: int, text: str, unit: str) -> Iterator[Callable[[int], object]]:
    """Context that yields a function to call with the amount of work done since the last call.

    A terminal shows a bar on stderr. Otherwise at most one line per minute is printed, the first
    after a minute. `text` is the name of the work, such as "reading test", and `unit` the unit of
    `total`; large numbers of "tok" (tokens) are abbreviated on terminals.
    """
    with tqdm(total=total, desc=text, unit=unit, unit_scale=unit == "tok", disable=None) as bar:
        yield bar.update if not bar.disable else _lines(total, text, unit)


def _lines(total: int, text: str, unit: str) -> Callable[[int], None]:
    """Returns a function that prints a line if the last one is `LINE_SECONDS` old."""
    done, last = 0, time.monotonic()
    name = {"tok": "tokens"}.get(unit, unit)

    def update(amount: int) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            output.say(f"{text}: {done:,} of {total:,} {name}")

    return update
