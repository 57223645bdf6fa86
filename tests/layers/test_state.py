import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Model
from brt.layers.kinds import KINDS, replace_parts
from brt.layers.recurrent import RecurrentState
from brt.layers.runs import parts
from brt.layers.sections import Recurrence
from brt.layers.state import WindowState, zero_where_invalid
from brt.memories import DenseMemory, Memorizing, Routing
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


@pytest.mark.parametrize("name", KINDS)
def test_the_parts_are_all_that_a_state_is_and_can_be_exchanged_one_by_one(name: str) -> None:
    kinds = (
        Recurrence(states=3), Memorizing(size=128), DenseMemory(size=128), Routing(heads=1),
    )  # fmt: skip
    model = Model(model_dim=4, heads=2, head_dim=4, window=3, kinds=kinds)
    kind = KINDS[name]
    state = kind.new_state(model, 2, jnp.dtype("float32"))
    donor = jax.tree.map(lambda x: x + 1 if x.dtype != bool else ~x, state)
    changed = [
        {i for i, (a, b) in enumerate(zip(*map(jax.tree.leaves, pair), strict=True)) if a is not b}
        for pair in ((state, replace_parts(kind, state, donor, [part])) for part in kind.parts)
    ]
    assert set().union(*changed) == set(range(len(jax.tree.leaves(state))))
    assert sum(map(len, changed)) == len(jax.tree.leaves(state)), "no array has two names"


def test_every_kind_but_the_window_has_a_section_that_places_it() -> None:
    for name, kind in KINDS.items():
        assert (kind.section is None) == (name == "window")
        assert kind.section is None or name in kind.section().layers_by_kind()


def test_what_is_forgotten_is_as_if_nothing_had_been_read() -> None:
    model = Model(
        layers=2,
        model_dim=4,
        heads=1,
        head_dim=4,
        window=3,
        dtype="float32",
        kinds=(Recurrence(layers=(1,), states=3),),
    )
    new = new_state(model, 2)
    read = jax.tree.map(lambda x: x + 1 if x.dtype != bool else ~x, new)
    assert parts(model) == {"cache", "state"}
    jax.tree.map(np.testing.assert_array_equal, forget(model, read, parts(model)), new)
    window, recurrent = forget(model, read, {"state"})
    assert window.valid.all() and recurrent.window.valid.all() and not recurrent.valid.any()
    window, recurrent = forget(model, read, {"cache", "memory"})
    assert not (window.valid.any() or recurrent.window.valid.any()) and recurrent.valid.all()
