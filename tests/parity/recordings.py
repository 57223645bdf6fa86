"""Recorded outputs of the original code, and the tolerances of comparisons with them."""

import json
from pathlib import Path

import jax
import numpy as np

# What files of each kind begin with, by the argument of the tests that read them.
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
    """The arrays of one file; `under` gives those of a folder by their names within it."""

    def __init__(self, path: Path) -> None:
        super().__init__(arrays(path))
        self.meta = json.loads(str(self.pop("meta")))

    def under(self, folder: str) -> dict[str, np.ndarray]:
        return {k[len(folder) + 1 :]: v for k, v in self.items() if k.startswith(folder + "/")}


def assert_close(
    actual: jax.Array, expected: np.ndarray, name: str, scale: float | None = None
) -> None:
    """Relative to `scale`: the largest magnitude, or of a sum that of all its terms."""
    scale = max(scale or float(np.abs(expected).max()), 1e-3)
    error = float(np.abs(np.asarray(actual) - expected).max()) / scale
    assert error <= TOLERANCE, f"{name}: relative error {error:.2e}"
