import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Model
from brt.layers.cache import TokenProjections, with_cache
from brt.layers.kinds import KINDS
from brt.layers.state import Given, WindowState
from brt.layers.window import WindowLayer

MODEL = Model(window=2, heads=1, head_dim=1)


def test_the_cache_is_read_where_a_document_goes_on_and_kept_for_the_next_segment() -> None:
    tokens = jnp.arange(2 * 6, dtype=jnp.float32).reshape(2, 6, 1, 1)
    state = WindowState(tokens[:, :2] - 100, tokens[:, :2] - 200, jnp.array([True, False]))
    start = jnp.array([[False, False, True], [False, True, False]])
    given = Given(state, document_start=start)
    projections = TokenProjections(tokens, tokens, -tokens, None, tokens[..., 0])

    past, after = with_cache(MODEL, given, projections)
    keys, values = past.joined(projections)
    np.testing.assert_array_equal(keys[0, :, 0, 0], [-100, -99, 0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(values[0, :, 0, 0], [-200, -199, 0, -1, -2, -3, -4, -5])
    np.testing.assert_array_equal(past.cache_mask, [[True, True, False], [False, False, True]])
    np.testing.assert_array_equal(after.keys, tokens[:, 4:])
    np.testing.assert_array_equal(after.values, -tokens[:, 4:])
    assert after.valid.all()

    vanilla = with_settings(MODEL, {"Window.cache": False, "Window.mask_empty_cache": False})
    past, same = with_cache(vanilla, given, projections)
    assert not past.cache_mask.any()
    jax.tree.map(np.testing.assert_array_equal, same, after)

    parity = with_settings(MODEL, {"Window.mask_empty_cache": False})
    keys, values, *_ = with_cache(parity, given, projections)[0]
    assert keys[0].all() and not keys[1].any() and not values[1].any()


@pytest.mark.parametrize(
    ("positions", "shapes"),
    [
        ("t5", {"relative_bias": (3, 32)}),
        ("alibi", {"alibi_scale": (), "alibi_bound": (1,)}),
        ("rotary", {}),
        ("none", {}),
    ],
)
def test_positions_have_parameters_of_their_own(positions: str, shapes: dict) -> None:
    model = Model(window=4, model_dim=8, heads=3, head_dim=2, mlp_dim=8, positions=positions)
    x, state = jnp.zeros((1, 4, 8)), KINDS["window"].new_state(model, 1, jnp.dtype("float32"))
    key, start = jax.random.key(0), jnp.ones((1, 1), bool)
    given = Given(state, document_start=start)
    tree = jax.eval_shape(lambda: WindowLayer(model).init(key, x, given))
    tokens = {name: leaf.value.shape for name, leaf in tree["params"]["tokens"].items()}
    found = {n: s for n, s in tokens.items() if n.startswith(("relative", "alibi"))}
    assert found == shapes and len(tokens) == 9 + len(found)
