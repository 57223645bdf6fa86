"""Reads recorded outputs of the original code, and compares arrays with them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The names of the files of each kind begin with these prefixes. The keys are the arguments of the
# tests that read the files.
PATTERNS = {
    "layer_file": ("sliding_layer_", "xl_layer_", "recurrent_layer_"),
    "stack_file": ("stack_",),
    "melodi_layer_file": ("melodi_short", "melodi_long"),
    "melodi_stack_file": ("melodi_stack",),
    "dense_layer_file": ("densekv_layer",),
    "dense_stack_file": ("densekv_stack",),
    "optimizer_file": ("opt_adafactor",),
    "schedule_file": ("lr_schedules",),
    "bias_file": ("t5_bias",),
    "knn_file": ("knn_memory",),
    "external_file": ("external_attention",),
    "exact_file": ("full", "exact_topk"),
    "reformer_file": ("reformer_",),
    "hash_file": ("hash_",),
    "kmeans_file": ("kmeans_",),
    "clustered_file": ("clustered_", "iclustered_"),
}

TOLERANCE = 1e-5  # relative to the largest magnitude of the array, float32


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads all arrays of an .npz file and closes the file."""
    with np.load(path) as stored:
        return dict(stored)


class Golden(dict):
    """The arrays of one recording.

    The method `under` returns the arrays of a folder by their names within the folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(arrays(path))
        self.meta = json.loads(str(self.pop("meta")))

    def under(self, folder: str) -> dict[str, np.ndarray]:
        return {k[len(folder) + 1 :]: v for k, v in self.items() if k.startswith(folder + "/")}


def assert_close(
    actual: jax.Array, expected: np.ndarray, name: str, scale: float | None = None
) -> None:
    """Checks the error relative to `scale`, by default the largest magnitude.

    For a sum, `scale` is the sum of the magnitudes of its terms.
    """
    scale = max(scale or float(np.abs(expected).max()), 1e-3)
    error = float(np.abs(np.asarray(actual) - expected).max()) / scale
    assert error <= TOLERANCE, f"{name}: relative error {error:.2e}"


def assert_trees_close(actual: Any, expected: Any, name: str) -> None:
    """Compares two trees of equal structure, as `assert_close` does."""

    def compare(path: tuple, one: jax.Array, other: np.ndarray) -> None:
        assert_close(one, other, f"{name} of {jax.tree_util.keystr(path)}")

    jax.tree.map_with_path(compare, actual, expected)


def nats_of_next_tokens(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the loss of the original codes: the sum of nats over pairs of tokens above 0."""
    targets = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
    scored = (tokens > 0) & (targets > 0)
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return jnp.sum(nats[..., 0] * scored)
