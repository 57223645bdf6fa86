"""Tests the stores of prepared rows, which all tasks with rows use."""

from pathlib import Path

import numpy as np
import pytest

from brt.data import stores
from brt.errors import DataError


def test_a_store_is_compared_with_its_hashes_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "frames.bin").write_bytes(bytes(range(8)))
    stores.finish(tmp_path, {"ids": ["a", "b"], "sizes": np.arange(2)}, {})
    with stores.opened(tmp_path) as found:
        assert found.columns["ids"] == ("a", "b")
    (tmp_path / "frames.bin").write_bytes(bytes(8))
    with pytest.raises(
        DataError, match=r"^the store .* is damaged \(frames\.bin has the sha256 .*; delete it and"
    ):
        with stores.opened(tmp_path):
            pass
    with pytest.raises(DataError, match=r"frames\.bin has the sha256"):
        stores.verify(tmp_path)
