"""Measures functions in turn, and prints tables of their times."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def interleaved(
    functions: dict[str, Callable[[], Any]], rounds: int, repeats: int = 1
) -> dict[str, list[float]]:
    """Runs all functions in each round, and returns their milliseconds in each round.

    An additional first round is not counted.

    Args:
      functions: functions by name; they return values that `jax.block_until_ready` waits for.
      rounds: number of rounds.
      repeats: number of calls that are timed together; the time is divided by it.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            for _ in range(repeats):
                out = function()
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - begin) * 1e3 / repeats)
    return {name: own[1:] for name, own in times.items()}


def ratio(times: dict[str, list[float]], name: str, baseline: str) -> float:
    """Returns the median over rounds of the ratio of one function's time to another's."""
    return statistics.median(a / b for a, b in zip(times[name], times[baseline], strict=True))


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table with a title; the keys of the rows are the column heads."""
    widths = {
        name: max(len(name), 10, *(len(row[name]) for row in rows if isinstance(row[name], str)))
        for name in rows[0]
    }
    print(title)
    print("  ".join(f"{name:>{widths[name]}}" for name in rows[0]))
    for row in rows:
        cells = [
            f"{value:>{widths[name]}}"
            if not isinstance(value, float)
            else f"{value:>{widths[name]},.{3 if value < 10 else 1}f}"
            for name, value in row.items()
        ]
        print("  ".join(cells))
    print()
