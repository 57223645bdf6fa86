"""slow.txt names tests that exist, and a function without a quick case is known for one."""

import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def lines(name: str) -> list[str]:
    return [x for x in (TESTS / name).read_text().splitlines() if x and not x.startswith("#")]


SLOW_ALONE = lines("slow_alone.txt")


@pytest.mark.parametrize("line", lines("slow.txt"))
def test_a_line_names_a_test_of_its_file(line: str) -> None:
    file, _, name = line.partition("::")
    begin = re.split(r"[*\[]", name)[0]
    assert f"def {begin}" in (TESTS / file).read_text()


def test_every_function_has_a_quick_case_or_is_listed_with_the_reason(
    cases: dict[str, Counter[str]],
) -> None:
    """No property leaves `make test` unseen; one that is back is taken from slow_alone.txt."""
    alone = {name.removeprefix("tests/") for name, count in cases.items() if not count["quick"]}
    assert not alone - set(SLOW_ALONE), "not in slow_alone.txt: a quick case, or the reason there"
    back = {name for name in SLOW_ALONE if f"tests/{name}" in cases} - alone
    assert not back, "in slow_alone.txt, but quick"


@pytest.mark.parametrize("name", SLOW_ALONE)
def test_what_is_slow_alone_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert f"def {function}(" in (TESTS / file).read_text()
