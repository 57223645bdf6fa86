"""Lists the tests' functions, a property each: how many cases are quick, how many are slow.

  python tools/list_properties.py [tests/ops ...] [--slow]

Nothing is run. A function without a quick case is marked; --slow lists those alone. Two such lists
show what moved between `make test` and `make test-all`, and that nothing got lost.
"""

import argparse
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "tests/conftest.py"


class Cases:
    """A plugin that keeps what tests/conftest.py has counted."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        conftest = session.config.pluginmanager.get_plugin(str(CONFTEST))
        self.found = session.config.stash[conftest.CASES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", help="files or folders; default: all")
    parser.add_argument("--slow", action="store_true", help="only functions without a quick case")
    args = parser.parse_args()
    cases = Cases()
    flags = ["--collect-only", "-p", "no:xdist", "-p", "no:terminal"]
    if code := pytest.main([*flags, *args.paths], plugins=[cases]):
        sys.exit(code)
    for function, count in sorted(cases.found.items()):
        if not (args.slow and count["quick"]):
            mark = "" if count["quick"] else "  slow alone"
            print(f"{count['quick']:4d} quick {count['slow']:4d} slow  {function}{mark}")
    quick, slow = (sum(count[kind] for count in cases.found.values()) for kind in ("quick", "slow"))
    print(f"{quick} quick and {slow} slow cases of {len(cases.found)} functions")


if __name__ == "__main__":
    main()
