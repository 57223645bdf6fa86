"""Makes calls of each kind below a directory, to test the library that lets some of them fail.

python strike_calls.py DIRECTORY
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from calls import SHORT, Calls


def outcomes(doing: Callable[[], object], times: int) -> list[int]:
    """Returns the error number of each attempt, or 0 if the attempt succeeded."""
    found = []
    for _ in range(times):
        try:
            doing()
            found.append(0)
        except OSError as error:
            found.append(error.errno)
    return found


def main(place: Path) -> None:
    own, other, calls = place / "own", place / "owner", Calls()
    other.write_bytes(b"whole")
    file = os.open(own / "file", os.O_RDWR | os.O_CREAT)

    def linked() -> None:
        os.link(other, own / "linked")
        os.unlink(own / "linked")

    def moved() -> None:
        shutil.copy(other, place / "copy")
        os.rename(place / "copy", own / "moved")

    def made() -> None:
        (own / "made").mkdir()
        (own / "made").rmdir()

    doings = {
        "write": lambda: os.write(file, b"ab"),
        "fsync": lambda: os.fsync(file),
        "truncate": lambda: os.ftruncate(file, 0),
        "rename": moved,
        "link": linked,
        "unlink": linked,
        "mkdir": made,
        "open": lambda: os.close(os.open(own / "opened", os.O_WRONLY | os.O_CREAT)),
    }
    for kind, doing in doings.items():
        for sticky in (False, True):
            with calls.armed(own, kind, 2, errno.EDQUOT, sticky):
                found = outcomes(doing, 3)
                outside = outcomes(lambda: (place / "outside").write_bytes(b"ab"), 3)
            (own / "linked").unlink(missing_ok=True)
            wanted = [0, errno.EDQUOT, errno.EDQUOT if sticky else 0]
            if kind == "unlink":
                wanted[-1] = errno.EEXIST  # files whose removal failed still exist
            assert (found, outside) == (wanted, [0, 0, 0]), (kind, sticky, found, outside)
            assert calls.hit and calls.count >= 2, kind
    with calls.armed(own, "short", 2, SHORT):
        assert [os.write(file, b"abcd") for _ in range(3)] == [4, 2, 4]
    with calls.armed(own, "short", 1, SHORT):
        assert outcomes(lambda: os.write(file, b"a"), 2) == [errno.ENOSPC, 0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
