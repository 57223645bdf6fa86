"""slow.txt names tests that exist, and a function without a quick case is known for one."""

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent


def lines(name: str) -> list[str]:
    return [x for x in (TESTS / name).read_text().splitlines() if x and not x.startswith("#")]


SLOW_ALONE = lines("slow_alone.txt")


def unknown(patterns: list[str]) -> list[str]:
    """Those whose file has no function that begins so."""
    split = [line.partition("::") for line in patterns]
    texts = {file: (TESTS / file).read_text() for file, _, _ in split}
    begins = {f"{file}::{name}": f"def {re.split(r'[*[]', name)[0]}" for file, _, name in split}
    return [line for line, begin in begins.items() if begin not in texts[line.partition("::")[0]]]


def test_every_line_names_a_test_of_its_file() -> None:
    assert unknown(lines("slow.txt")) == []
    assert unknown([f"{name}(" for name in SLOW_ALONE]) == []


def test_every_function_has_a_quick_case_or_is_listed_with_the_reason(
    cases: dict[str, Counter[str]],
) -> None:
    """No property leaves `make test` unseen; one that is back is taken from slow_alone.txt."""
    alone = {name.removeprefix("tests/") for name, count in cases.items() if not count["quick"]}
    assert not alone - set(SLOW_ALONE), "not in slow_alone.txt: a quick case, or the reason there"
    back = {name for name in SLOW_ALONE if f"tests/{name}" in cases} - alone
    assert not back, "in slow_alone.txt, but quick"
