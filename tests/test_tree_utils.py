from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from brt import tree_utils

META = {"step": 3, "data": {"epoch": 1}, "seed": 0}


class Pair(NamedTuple):
    keys: jax.Array
    valid: jax.Array


def tree() -> dict:
    return {
        "params": {"w": jnp.arange(16.0).reshape(8, 2)},
        "state": (Pair(jnp.ones((2, 3), jnp.bfloat16), jnp.zeros((), bool)),),
    }


def test_names_are_paths_through_any_container() -> None:
    assert list(tree_utils.named(tree())) == ["params/w", "state/0/keys", "state/0/valid"]


def test_description_inverts_to_abstract_arrays() -> None:
    description = tree_utils.describe(tree_utils.named(tree()))
    assert description["state/0/keys"] == {"dtype": "bfloat16", "shape": [2, 3]}
    assert tree_utils.describe(tree_utils.abstract(description)) == description


def test_differences_name_the_leaf_and_both_types() -> None:
    saved = tree_utils.describe(tree_utils.named(tree()))
    wanted = {**saved, "params/w": {"dtype": "float32", "shape": [8, 4]}}
    wanted["params/b"] = wanted.pop("state/0/valid")
    assert tree_utils.differences(saved, saved) == []
    assert tree_utils.differences(saved, wanted) == [
        "params/w is float32[8,2] in the checkpoint and float32[8,4] here",
        "params/b is not in the checkpoint",
        "state/0/valid is only in the checkpoint",
    ]
    assert len(tree_utils.differences(saved, wanted, partial=True)) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64"])
def test_one_value_that_is_not_finite_is_found(bad: float, dtype: str) -> None:
    state = tree_utils.named(tree())
    assert tree_utils.not_finite(state) == []
    state["state/0/keys"] = jnp.ones((2, 3), dtype).at[1, 2].set(bad)
    assert tree_utils.not_finite(state) == ["state/0/keys"]


def test_integers_are_always_finite() -> None:
    assert tree_utils.not_finite({"n": jnp.arange(3)}) == []


def test_required_bytes_counts_abstract_arrays() -> None:
    assert tree_utils.required_bytes(tree()) == 16 * 4 + 6 * 2 + 1
    assert tree_utils.required_bytes(jax.eval_shape(tree)) == 16 * 4 + 6 * 2 + 1


def test_hash_ignores_sharding_and_containers() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    state = tree()
    expected = tree_utils.state_hash(state, META)
    state["params"]["w"] = jax.device_put(
        state["params"]["w"], NamedSharding(mesh, PartitionSpec("data"))
    )
    assert tree_utils.state_hash(state, META) == expected
    assert tree_utils.state_hash(tree_utils.named(state), {**META, "devices": 8}) == expected


def test_hash_sees_every_value_name_type_shape_and_position() -> None:
    state, name = tree_utils.named(tree()), "params/w"
    changed = [
        {**state, name: state[name].at[7, 1].add(1e-6)},
        {**state, name: state[name].reshape(2, 8)},
        {**state, name: state[name].view(jnp.int32)},
        {**{key: state[key] for key in state if key != name}, "params/v": state[name]},
    ]
    hashes = {tree_utils.state_hash(other, META) for other in [state, *changed]}
    hashes |= {tree_utils.state_hash(state, {**META, key: 7}) for key in ("step", "data", "seed")}
    assert len(hashes) == 8
