"""Tests that files which are not saved memories are refused."""

import pickle
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from brt.errors import DataError
from brt.generation.memory import Memory, load


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
        load(path, Memory((), (), *np.zeros((5, 1), np.int32)), 1, {})
    said = str(error.value)
    assert said == (
        f"{path} is no state that --save_state wrote, or it is damaged; name such a file with "
        "--load_state"
    )


def _forged(kind: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    match kind:
        case "identity":
            return arrays | {"identity": np.zeros((), "U2000000")}
        case "shape":
            return arrays | {"leaf1": np.zeros((1 << 22,), np.int32)}
        case "dtype":
            return arrays | {"leaf1": np.zeros(3, "U2000000")}
        case "another":
            return arrays | {"more": np.zeros(1 << 24, np.uint8)}
        case _:
            return arrays | {
                f"a_member_of_a_long_name_{i:099}": np.zeros(()) for i in range(10_000)
            }


@pytest.mark.parametrize("kind", ["identity", "shape", "dtype", "another", "members"])
def test_nothing_is_unpacked_before_headers_are_compared(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory((), (), *jnp.zeros((5, 3), jnp.int32))
    arrays = {f"leaf{i}": np.zeros(3, np.int32) for i in range(5)}
    forged = _forged(kind, arrays | {"identity": np.array("{}")})
    np.savez_compressed(tmp_path / "state.npz", **forged)

    def no_more_than(count: int, dtype: object) -> np.ndarray:
        assert count < 1 << 20, f"{count:,} bytes are unpacked"
        return np.zeros(count, dtype)

    monkeypatch.setattr("brt.untrusted.np.empty", no_more_than)
    with pytest.raises(DataError):
        load(tmp_path / "state.npz", memory, 1, {})
