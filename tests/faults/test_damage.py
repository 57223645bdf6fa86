"""Tests that a flipped bit in a file is reported or has no effect."""

import random
import shutil
from pathlib import Path

import pytest
from tiny_runs import flip, state_hash

from .harness import UNCHECKED, Runs, file_classes, flips


@pytest.mark.slow
def test_a_bit_in_every_class_of_file_is_named_or_of_no_matter(tmp_path: Path) -> None:
    own = Runs(tmp_path / "own", "language")
    half, cache = tmp_path / "half/run", tmp_path / "own/cache"
    own.strike(half, "evaluating", "terminate")
    shutil.copytree(cache, tmp_path / "cache")
    classes = file_classes(half, cache)
    assert {kind.split("/")[0] for kind in classes} == {"workdir", "cache"} and len(classes) > 10
    for number, one in enumerate(flips(half, cache, len(classes), random.Random(0))):
        workdir = tmp_path / f"{number}/run"
        shutil.copytree(half, workdir)
        moved = workdir / one.file.relative_to(half) if half in one.file.parents else one.file
        flip(moved, one.bit)
        life = own.live(workdir)
        what = f"bit {one.bit} of {one.kind}: {life.code}: {life.said}"
        assert "Traceback" not in life.said, what
        if life.code == 0:
            try:
                own.assert_as_if_nothing_had_been(workdir)
            except AssertionError:
                same = state_hash(workdir) == state_hash(own.whole)
                assert "warning: " in life.said or (one.kind == UNCHECKED and same), what
        else:
            assert life.code in (2, 3, 4) and "brt: error: " in life.said, what
        shutil.rmtree(cache)
        shutil.copytree(tmp_path / "cache", cache)
