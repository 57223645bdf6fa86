"""Functions that take turns, and tables of their times."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def interleaved(
    functions: dict[str, Callable[[], Any]], rounds: int, repeats: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of each function in each round; a first round is thrown away."""
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
    """The median over rounds of one function's time to another's."""
    return statistics.median(a / b for a, b in zip(times[name], times[baseline], strict=True))


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A table."""
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
