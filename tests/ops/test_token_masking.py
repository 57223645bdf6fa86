import jax
import jax.numpy as jnp
import numpy as np

from brt.ops.token_masking import MaskedTokens, mask_tokens, prediction_counts, prediction_slots

MASK, TOKENS, SHARE = 40, 900, 0.15
LENGTHS = np.array([900, 300, 2, 0])
draw = jax.jit(lambda *x: mask_tokens(*x, share=SHARE, mask_id=MASK))


def masked(seeds: list[int]) -> tuple[np.ndarray, np.ndarray, MaskedTokens]:
    """Returns tokens, the mask of valid tokens, and the masked tokens, with one row per seed.

    Row i counts up from i modulo MASK.
    """
    tokens = (np.arange(TOKENS)[None] + np.arange(len(seeds))[:, None]) % MASK
    valid = np.arange(TOKENS)[None] < LENGTHS[: len(seeds), None]
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    found = draw(jnp.asarray(tokens), jnp.asarray(valid), keys)
    return tokens, valid, MaskedTokens(*map(np.asarray, found))


def test_each_row_has_its_share_and_nothing_else_changes() -> None:
    tokens, valid, found = masked([0, 1, 2, 3])
    np.testing.assert_array_equal(found.scored.sum(axis=1), [135, 45, 1, 0])
    np.testing.assert_array_equal(
        prediction_counts(jnp.asarray(valid), SHARE), found.scored.sum(axis=1)
    )
    for row in range(4):
        places = found.positions[row][found.scored[row]]
        assert len(set(places.tolist())) == len(places) and valid[row, places].all()
        np.testing.assert_array_equal(found.targets[row], tokens[row, found.positions[row]])
        changed = np.flatnonzero(found.inputs[row] != tokens[row])
        assert set(changed) <= set(places)
    assert found.inputs.max() == MASK


def test_most_are_hidden_some_replaced_some_left() -> None:
    """80 % of the chosen tokens are masked, 10 % are replaced by random tokens, and 10 % stay. A
    random token equals the true one with probability 1 / 40.
    """
    tokens, _, found = masked([0])
    for seed in range(1, 5):
        _, _, more = masked([seed])
        found = MaskedTokens(*(np.concatenate(pair) for pair in zip(found, more, strict=True)))
    after = np.take_along_axis(found.inputs, found.positions, axis=1)[found.scored]
    before = found.targets[found.scored]
    hidden, same = np.mean(after == MASK), np.mean(after == before)
    # About three standard deviations of 675 draws.
    assert abs(hidden - 0.8) < 0.05 and abs(same - 0.1025) < 0.04
    replaced = after[(after != MASK) & (after != before)]
    assert len(np.unique(replaced)) > 20, "drawn from all tokens"


def test_a_row_depends_on_its_own_key() -> None:
    _, _, whole = masked([5, 6, 7])
    _, _, again = masked([5, 1, 7])
    for x, y in zip(whole, again, strict=True):
        np.testing.assert_array_equal(x[[0, 2]], y[[0, 2]])
    assert np.any(whole.positions[1] != again.positions[1])


def test_slots_hold_every_share_and_cut_into_equal_chunks() -> None:
    for length in (1, 7, 853, 50_000):
        for share in (0.01, SHARE, 0.5, 1.0):
            size = prediction_slots(length, share)
            wanted = int(prediction_counts(jnp.ones((1, length), bool), share)[0])
            assert wanted <= size <= length
            assert size == length or size <= 128 or size % 128 == 0
