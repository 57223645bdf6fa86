import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Model
from brt.layers.state import (
    RecurrentState,
    WindowState,
    cut_gradient,
    forget,
    graft,
    new_layer_state,
    parts,
    zero_where_invalid,
)


def window(valid: tuple[bool, bool] = (True, True)) -> WindowState:
    keys = jnp.ones((2, 3, 1, 4))
    return WindowState(keys, 2 * keys, jnp.array(valid))


def recurrent() -> RecurrentState:
    return RecurrentState(window(), jnp.ones((2, 3, 4)), jnp.array([True, False]))


@pytest.mark.parametrize(
    ("parts", "cache", "vectors"),
    [
        ({}, [False, False], [False, False]),
        ({"cache": False}, [True, True], [False, False]),
        ({"vectors": False}, [False, False], [True, False]),
    ],
)
def test_forget_takes_away_the_named_part(parts: dict, cache: list, vectors: list) -> None:
    after = forget(recurrent(), **parts)
    assert after.window.valid.tolist() == cache and after.valid.tolist() == vectors
    assert forget(window(), **parts).valid.tolist() == cache


def test_zero_where_invalid_is_by_lane() -> None:
    after = zero_where_invalid(window((True, False)))
    assert np.all(after.keys[0] == 1) and np.all(after.values[0] == 2)
    assert not np.any(after.keys[1]) and not np.any(after.values[1])


def test_cut_gradient_lets_none_through() -> None:
    def total(vectors: jax.Array, cut: bool) -> jax.Array:
        state = recurrent()._replace(vectors=vectors)
        return jnp.sum((cut_gradient(state) if cut else state).vectors)

    gradient = jax.grad(total)
    assert np.all(gradient(jnp.ones((2, 3, 4)), False) == 1)
    assert not np.any(gradient(jnp.ones((2, 3, 4)), True))


@pytest.mark.parametrize("kind", ["window", "recurrent", "memorizing", "clustered"])
def test_the_parts_are_all_that_a_state_is_and_can_be_exchanged_one_by_one(kind: str) -> None:
    model = Model(model_dim=4, heads=1, head_dim=4, window=3, states=3, memory_size=128)
    state = new_layer_state(model, kind, 2, jnp.dtype("float32"))
    donor = jax.tree.map(lambda x: x + 1 if x.dtype != bool else ~x, state)
    named = parts(state)
    assert named == {"cache"} | {
        "recurrent": {"state"}, "memorizing": {"memory"}, "clustered": {"memory"}
    }.get(kind, set())  # fmt: skip
    changed = [
        {i for i, (a, b) in enumerate(zip(*map(jax.tree.leaves, pair), strict=True)) if a is not b}
        for pair in ((state, graft(state, donor, part)) for part in sorted(named))
    ]
    assert set().union(*changed) == set(range(len(jax.tree.leaves(state))))
    assert sum(map(len, changed)) == len(jax.tree.leaves(state)), "no array has two names"
