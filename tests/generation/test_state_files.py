"""Tests that files which are not saved memories are refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from brt.errors import DataError
from brt.generation import state_files
from brt.generation.memory import Memory


@pytest.mark.parametrize("kind", ["text", "pickle", "npy", "npz", "cut", "empty"])
def test_a_file_that_is_no_state_is_refused_in_our_own_words(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    match kind:
        case "text":
            path.write_text("Call me Ishmael. " * 20)
        case "pickle":
            path.write_bytes(pickle.dumps({"a": 1}))
        case "npy":
            np.save(tmp_path / "a", np.zeros(3))
            (tmp_path / "a.npy").rename(path)
        case "empty":
            path.touch()
        case _:
            np.savez(path, a=np.zeros(3))
            if kind == "cut":
                path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError) as error:
        state_files.load(path, Memory((), (), *np.zeros((5, 1), np.int32)), 1, {}, dict)
    said = str(error.value)
    assert said == (
        f"{path} is no state that --save_state wrote, or it is damaged; name such a file with "
        "--load_state"
    )
