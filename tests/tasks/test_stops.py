"""Tests stop strings without a model."""

import random

import pytest

from brt.tasks.writers import StopFilter


def expected(text: str, stops: list[str]) -> str:
    """Returns the text up to the stop string that is complete first, by trying all ends."""
    for end in range(len(text) + 1):
        if whole := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, whole))]
    return text


@pytest.mark.parametrize("seed", range(50))
def test_a_text_ends_at_the_first_complete_stop_string_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab", k=40))
    stops = ["".join(rng.choices("ab", k=rng.randint(3, 7))) for _ in range(rng.randint(1, 3))]
    found, shown, start = StopFilter(stops), "", 0
    while start < len(text) and not found.found:
        end = start + rng.randint(1, 6)
        shown += found.add(text[start:end])
        assert expected(text, stops).startswith(shown), "nothing is withdrawn"
        start = end
    shown += "" if found.found else found.add("", final=True)
    assert shown == expected(text, stops)
    assert found.found == (shown != text)
