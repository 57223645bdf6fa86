"""Compares the search in a memory and the attention to its results with the original code."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from recordings import arrays

from brt.config import Model
from brt.layers.kinds import KINDS
from brt.memories import Memorizing
from brt.memories.memorizing import Search, attend_to_neighbors, find_neighbors
from brt.memories.past_tokens import MemoryState, memory_and_segment, state_after_segment
from brt.ops.top_k import take

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1


def assert_the_same_sets(actual: np.ndarray, expected: np.ndarray) -> None:
    """Checks that every query has the same vectors in any order. Arrays are [B, H, Q, R, K]."""

    def ordered(vectors: np.ndarray) -> np.ndarray:
        rows = vectors.reshape(-1, *vectors.shape[-2:])
        return np.stack([row[np.lexsort(row.round(4).T)] for row in rows])

    np.testing.assert_allclose(ordered(actual), ordered(expected), atol=TOLERANCE)


def test_bucketed_search_equals_the_recordings(knn_file: Path) -> None:
    golden = arrays(knn_file)
    written, heads, width = golden["k1"].shape[1:]
    lanes, neighbors = len(golden["q"]), golden["keys"].shape[3]
    model = Model(
        heads=heads, head_dim=width, window=written,
        kinds=(Memorizing(size=3 * written, neighbors=neighbors, search="bucketed"),),
    )  # fmt: skip
    state = KINDS["memorizing"].new_state(model, lanes, jnp.dtype("float32"))
    for n in (1, 2):
        past = memory_and_segment(state, jnp.asarray(golden[f"k{n}"]), jnp.asarray(golden[f"v{n}"]))
        state = state_after_segment(
            past, state.length + written, state.window, size=model.of(Memorizing).size
        )

    def check(state: MemoryState, keys: np.ndarray, values: np.ndarray) -> None:
        queries = jnp.asarray(golden["q"]).swapaxes(1, 2)
        search = Search(3 * written, neighbors, "bucketed")
        found = find_neighbors(queries, state.keys, state.length, search)
        pairs = zip((state.keys, state.values), (keys, values), strict=True)
        for ours, theirs in pairs:
            vectors = np.where(found.there[..., None], take(ours, found.indices), 0)
            assert_the_same_sets(vectors, theirs.swapaxes(1, 2))

    check(state, golden["keys"], golden["values"])
    reset = jnp.asarray(golden["reset"].reshape(lanes, heads)[:, 0])
    forgotten = state._replace(length=jnp.where(reset, 0, state.length))
    check(forgotten, golden["keys_after_reset"], golden["values_after_reset"])


def test_attention_to_neighbors_equals_the_recordings(external_file: Path) -> None:
    golden = arrays(external_file)
    queries = jnp.asarray(golden["q"] * golden["scale"][:, None]).swapaxes(1, 2)
    keys, values = (jnp.asarray(golden[name]).swapaxes(1, 2) for name in ("ek", "ev"))
    there = jnp.ones(keys.shape[:-1], bool)
    attend = jax.jit(attend_to_neighbors, static_argnames="null_keys")
    y = attend(queries, keys, values, there, null_keys=False)
    np.testing.assert_allclose(y.swapaxes(1, 2), golden["y"], atol=TOLERANCE)
