import json
import os
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from brt.config import Config, Model
from brt.layers.sections import Recurrence
from brt.training.layerwise import as_matrix, from_matrix, matrix_names, matrix_shape
from brt.training.state import initial_params

GOLDEN = Path(__file__).parent.parent / "data" / "parameters.json"


def test_parameters_have_their_names_shapes_and_axes() -> None:
    """Compares the names in checkpoints with a golden file; UPDATE_GOLDEN=1 rewrites it."""
    model = Model(
        layers=4,
        model_dim=16,
        heads=2,
        head_dim=4,
        mlp_dim=24,
        window=4,
        vocab_size=32,
        kinds=(Recurrence(layers=(1,), states=6, gate="lstm", gate_layout="dual"),),
    )
    shapes = jax.eval_shape(lambda: initial_params(Config(model=model)))
    leaves = jax.tree.leaves_with_path(shapes, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    found = {
        "/".join(key.key for key in path): {
            "shape": list(leaf.value.shape),
            "axes": list(leaf.names),
        }
        for path, leaf in leaves
    }
    if os.environ.get("UPDATE_GOLDEN"):
        rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(found.items()))
        GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    assert found == json.loads(GOLDEN.read_text())


def test_kernels_of_keys_are_matrices_like_those_of_queries() -> None:
    """Otherwise optimizers would not treat the keys of grouped queries as matrices."""
    shape = (3, 16, 2, 4)
    queries = "layers", "embed", "heads", "head_dim"
    keys = "layers", "embed", "kv_heads", "head_dim"
    assert matrix_shape(keys, shape) == matrix_shape(queries, shape) == (3, 16, 8)
    assert matrix_names(keys) == ("layers", "embed", "kv_heads")
    x = jnp.arange(384).reshape(shape)
    np.testing.assert_array_equal(as_matrix(keys, x), as_matrix(queries, x))
    np.testing.assert_array_equal(from_matrix(keys, as_matrix(keys, x), shape), x)
