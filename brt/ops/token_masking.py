"""Masked tokens to be predicted (BERT, Devlin et al. 2019, section 3.1)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.top_k import top_k

HIDDEN, REPLACED = 0.8, 0.1  # shares that the mask replaces, and random tokens; the rest stays
_MULTIPLE = 128  # of predicted tokens, where there are many: they are dealt with in equal chunks


class MaskedTokens(NamedTuple):
    """Rows of tokens of which R are to be predicted.

    Attributes:
      inputs: int32, the tokens that are read.
      positions: int32, of those to be predicted, in random order.
      targets: int32, the tokens that were there.
      scored: False behind a row's share.
    """

    inputs: Int[Array, "B T"]
    positions: Int[Array, "B R"]
    targets: Int[Array, "B R"]
    scored: Bool[Array, "B R"]


def mask_tokens(
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    keys: Array,
    *,
    share: float,
    mask_id: int,
) -> MaskedTokens:
    """Draws tokens to be predicted, the same number of every row of the same length.

    Args:
      valid: False on padding, which is not drawn.
      keys: [B], one for each row, which alone decides what is drawn of it.
      share: of the valid tokens, in (0, 1].
      mask_id: above all tokens; random tokens are drawn from those below it.
    """
    length = tokens.shape[1]
    most = slots(length, share)
    draw = jax.vmap(lambda key: _draw(key, length, most, mask_id))
    order, fate, random = draw(keys)
    positions = top_k(jnp.where(valid, order, -1.0), most)[1]
    scored = jnp.arange(most)[None] < counts(valid, share)[:, None]
    targets = jnp.take_along_axis(tokens, positions, axis=1)
    changed = jnp.where(fate < HIDDEN + REPLACED, random, targets)
    changed = jnp.where(fate < HIDDEN, mask_id, changed)
    rows = jnp.arange(len(tokens))[:, None]
    inputs = tokens.at[rows, positions].set(jnp.where(scored, changed, targets))
    return MaskedTokens(inputs, positions, targets, scored)


def _draw(
    key: Array, length: int, most: int, mask_id: int
) -> tuple[Float[Array, " T"], Float[Array, " R"], Int[Array, " R"]]:
    of_order, of_fate, of_token = jax.random.split(key, 3)
    random = jax.random.randint(of_token, (most,), 0, mask_id, jnp.int32)
    return jax.random.uniform(of_order, (length,)), jax.random.uniform(of_fate, (most,)), random


def counts(valid: Bool[Array, "B T"], share: float) -> Int[Array, " B"]:
    """Tokens to be predicted of each row: its share, but at least one where there are any."""
    there = jnp.sum(valid, axis=1)
    wanted = jnp.maximum(jnp.round(there * share).astype(jnp.int32), 1)
    return jnp.minimum(wanted, there)


def slots(length: int, share: float) -> int:
    """R for rows of this length."""
    most = max(round(length * share) + 1, 1)  # float32 may round a half the other way
    if most > _MULTIPLE:
        most = -(-most // _MULTIPLE) * _MULTIPLE
    return min(most, length)
