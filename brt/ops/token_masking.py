"""Masked language modelling: the random choice of tokens to predict (BERT, Devlin et al. 2019,
section 3.1).

In shapes, B is the number of rows, T of tokens of a row, and R of slots of a row. A slot holds a
token to predict or is unused.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.top_k import top_k

# Of the tokens to predict, 80 % are replaced by the mask token and 10 % by a random token. The
# other tokens to predict stay as they are.
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
# The loss processes the slots of a row in chunks, whose size must divide the number of slots. If a
# row has more slots than this constant, their number is therefore rounded up to a multiple of the
# constant; otherwise the number might have no large divisor.
_CHUNK = 128


class MaskedTokens(NamedTuple):
    """Rows of tokens; the model has to predict up to R tokens of each row.

    Attributes:
      inputs: int32, the tokens that the model reads.
      positions: int32, the positions of the tokens to predict, in random order.
      targets: int32, the original tokens at these positions.
      scored: True for the slots that hold a token to predict, which are the first slots of a row;
        False for unused slots.
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
    """Chooses random tokens of each row to predict, and replaces most of them in the input.

    Of the chosen tokens, 80 % are replaced by the mask token and 10 % by random tokens.

    Args:
      tokens: the original tokens.
      valid: False for padding, which is never chosen.
      keys: [B], a random key for each row; the choice depends on the row's key alone.
      share: the fraction of valid tokens to predict, in (0, 1].
      mask_id: the id of the mask token, greater than all other tokens; random tokens are drawn
        below it.
    """
    length = tokens.shape[1]
    most = prediction_slots(length, share)
    draw = jax.vmap(lambda key: _draw(key, length, most, mask_id))
    order, fate, random = draw(keys)
    positions = top_k(jnp.where(valid, order, -1.0), most)[1]
    scored = jnp.arange(most)[None] < prediction_counts(valid, share)[:, None]
    targets = jnp.take_along_axis(tokens, positions, axis=1)
    changed = jnp.where(fate < MASK_SHARE + RANDOM_SHARE, random, targets)
    changed = jnp.where(fate < MASK_SHARE, mask_id, changed)
    rows = jnp.arange(len(tokens))[:, None]
    inputs = tokens.at[rows, positions].set(jnp.where(scored, changed, targets))
    return MaskedTokens(inputs, positions, targets, scored)


def _draw(
    key: Array, length: int, most: int, mask_id: int
) -> tuple[Float[Array, " T"], Float[Array, " R"], Int[Array, " R"]]:
    order_key, fate_key, token_key = jax.random.split(key, 3)
    random = jax.random.randint(token_key, (most,), 0, mask_id, jnp.int32)
    return jax.random.uniform(order_key, (length,)), jax.random.uniform(fate_key, (most,)), random


def prediction_counts(valid: Bool[Array, "B T"], share: float) -> Int[Array, " B"]:
    """Returns the number of tokens to predict in each row, int32.

    Args:
      valid: False for padding.
      share: the fraction of valid tokens to predict. At least one token is to be predicted, unless
        a row has no valid tokens.
    """
    count = jnp.sum(valid, axis=1)
    predicted = jnp.maximum(jnp.round(count * share).astype(jnp.int32), 1)
    return jnp.minimum(predicted, count)


def prediction_slots(length: int, share: float) -> int:
    """Returns R, the number of slots for predicted tokens of a row with `length` tokens.

    R is at least the number that `prediction_counts` may return, if `share` is the fraction of
    tokens to predict.
    """
    # One slot is added, because `prediction_counts` computes in float32 and may round a half up
    # where Python rounds the half down.
    most = max(round(length * share) + 1, 1)
    if most > _CHUNK:
        most = -(-most // _CHUNK) * _CHUNK
    return min(most, length)
