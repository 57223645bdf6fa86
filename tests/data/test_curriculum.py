from pathlib import Path

import numpy as np
import pytest

from brt.config import Data
from brt.data import lanes
from brt.data.lanes import LaneReader
from brt.data.preparation import prepare
from brt.errors import ConfigError

NEAR, FAR = (f"memory:copy/train/40?distance={distance}&length=4" for distance in (8, 64))
SIZES = {"batch_size": 4, "segment_length": 32, "window": 8}


def reader(cache: Path, train: tuple[str, ...], *steps: int) -> LaneReader:
    """Returns a reader of prepared documents whose later stages begin at these steps."""
    data = Data(train=train, curriculum=steps, cache_dir=str(cache), validation_fraction=0.0)
    return lanes.lane_reader(data, prepare(data, progress=False).split("train"), **SIZES)


def equal(a: tuple, b: tuple) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_further_documents_join_at_their_step(tmp_path: Path) -> None:
    staged, near = reader(tmp_path, (NEAR, FAR), 3), reader(tmp_path, (NEAR,))
    both = reader(tmp_path, (NEAR, FAR))
    assert all(equal(staged[step], near[step]) for step in range(3))
    assert all(equal(staged[3 + step], both[step]) for step in range(40))
    assert not equal(near[0], both[0]), "the two orders are told apart"
    assert staged[3].document_start[:, 0].all(), "no lane goes on with what it no longer reads"
    assert staged.identity != both.identity


@pytest.mark.parametrize(
    ("train", "steps", "sentence"),
    [
        (("corpus:novels/train", FAR), (3,), "is for memory tasks"),
        ((NEAR, FAR), (3, 5), "the first; these are 1"),
        ((NEAR, FAR, NEAR), (5, 5), "must be ascending steps above 0"),
        ((NEAR, FAR), (0,), "steps above 0"),
    ],
)
def test_steps_that_no_source_waits_for_are_refused(
    train: tuple[str, ...], steps: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Data(train=train, curriculum=steps)
