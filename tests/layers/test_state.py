import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Model
from brt.layers.kinds import KINDS, replace_parts
from brt.layers.recurrent import RecurrentState
from brt.layers.stack import parts
from brt.layers.state import WindowState, cut_gradient, zero_where_invalid
from brt.models.decoder import forget, new_state


def window(valid: tuple[bool, bool] = (True, True)) -> WindowState:
    keys = jnp.ones((2, 3, 1, 4))
    return WindowState(keys, 2 * keys, jnp.array(valid))


def recurrent() -> RecurrentState:
    return RecurrentState(window(), jnp.ones((2, 3, 4)), jnp.array([True, False]))


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


@pytest.mark.parametrize("name", KINDS)
def test_the_parts_are_all_that_a_state_is_and_can_be_exchanged_one_by_one(name: str) -> None:
    sizes = {"window": 3, "states": 3, "memory_size": 128, "routing_heads": 1}
    model = Model(model_dim=4, heads=2, head_dim=4, **sizes)
    kind = KINDS[name]
    state = kind.new_state(model, 2, jnp.dtype("float32"))
    donor = jax.tree.map(lambda x: x + 1 if x.dtype != bool else ~x, state)
    changed = [
        {i for i, (a, b) in enumerate(zip(*map(jax.tree.leaves, pair), strict=True)) if a is not b}
        for pair in ((state, replace_parts(kind, state, donor, [part])) for part in kind.parts)
    ]
    assert set().union(*changed) == set(range(len(jax.tree.leaves(state))))
    assert sum(map(len, changed)) == len(jax.tree.leaves(state)), "no array has two names"


def test_kinds_name_settings_that_exist_and_that_no_other_kind_reads() -> None:
    named = [setting for kind in KINDS.values() for setting in kind.settings]
    assert set(named) <= {field.name for field in dataclasses.fields(Model)}
    assert len(set(named)) == len(named)


def test_what_is_forgotten_is_as_if_nothing_had_been_read() -> None:
    model = Model(
        layers=2, recurrent_layers=(1,), model_dim=4, heads=1, head_dim=4, window=3, states=3,
        dtype="float32",
    )  # fmt: skip
    new = new_state(model, 2)
    read = jax.tree.map(lambda x: x + 1 if x.dtype != bool else ~x, new)
    assert parts(model) == {"cache", "state"}
    jax.tree.map(np.testing.assert_array_equal, forget(model, read, parts(model)), new)
    window, recurrent = forget(model, read, {"state"})
    assert window.valid.all() and recurrent.window.valid.all() and not recurrent.valid.any()
    window, recurrent = forget(model, read, {"cache", "memory"})
    assert not (window.valid.any() or recurrent.window.valid.any()) and recurrent.valid.all()
