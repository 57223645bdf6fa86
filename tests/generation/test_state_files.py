"""Tests that files which are not saved memories are refused."""

import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from brt.errors import DataError
from brt.generation.memory import Memory, load


def written(save: Callable[[BytesIO], None]) -> bytes:
    save(file := BytesIO())
    return file.getvalue()


ARRAYS = written(lambda file: np.savez(file, a=np.zeros(3)))
NO_STATES = {
    "text": b"Call me Ishmael. " * 20, "pickle": pickle.dumps({"a": 1}), "empty": b"",
    "npy": written(lambda file: np.save(file, np.zeros(3))), "npz": ARRAYS, "cut": ARRAYS[:-20],
}  # fmt: skip


@pytest.mark.parametrize("content", NO_STATES.values(), ids=NO_STATES)
def test_a_file_that_is_no_state_is_refused_in_our_own_words(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "state.npz"
    path.write_bytes(content)
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
