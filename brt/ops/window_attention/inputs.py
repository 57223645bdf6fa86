"""The arrays of window attention, and the band of biases that all tiles of a window share.

In shapes, H is the number of heads of queries, and G the number of heads of keys. Each head of keys
serves H / G consecutive heads of queries. Z = W + T is the number of cached keys and keys of the
segment together. The segment has D equal parts, and documents start only at starts of parts.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.normalization import l2_normalize, scaled_unit


class WindowInputs(NamedTuple):
    """The arrays of attention to a window of W tokens; `api.local_attention` describes them."""

    queries: Float[Array, "B T H K"]
    cached: tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]]
    keys: Float[Array, "B T G K"]
    values: Float[Array, "B T G K"]
    bias: Float[Array, "H W"] | None
    # For each part, the place of the first token of the part's document.
    first: Int[Array, "B D"]
    # A `DropoutMask`, or a `Dropout` for the implementation in `chunks`; None for no dropout.
    dropout: Any = None
    scale: Float[Array, " H"] | None = None

    @property
    def window(self) -> int:
        return self.cached[0].shape[1]

    @property
    def part(self) -> int:
        """The number of tokens in each of the D parts of the segment."""
        return self.queries.shape[1] // self.first.shape[1]

    def starts(self) -> Int[Array, "B T"]:
        """Returns the place of the first token of each token's document."""
        return jnp.repeat(self.first, self.part, axis=1)

    def joined(
        self,
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B Z G K"], Float[Array, "B Z G K"]]:
        """Returns queries, keys and values; keys and values begin with the cached ones.

        If there is a scale, keys are scaled to norm 1, and queries to the norm `scale`.
        """
        pairs = zip(self.cached, (self.keys, self.values), strict=True)
        keys, values = (jnp.concatenate(pair, axis=1) for pair in pairs)
        if self.scale is None:
            return self.queries, keys, values
        return scaled_unit(self.queries, self.scale), l2_normalize(keys), values


def bias_band(
    bias: Float[Array, "H W"], rows: int, columns: int, *, nearest: int, hidden: float
) -> Float[Array, "H R C"]:
    """Returns the biases of R = `rows` consecutive queries and C = `columns` consecutive keys.

    Key 0 stands W places before query 0, so the distance of query r and key c is d = r + W - c. The
    query sees the key if `nearest` <= d < W + `nearest`, and its bias is then in column d -
    `nearest`. All other pairs have the bias `hidden`.
    """
    window, length = bias.shape[1], rows + columns
    around = (0, 0), (1 - nearest, length - window - 1 + nearest)
    band = jnp.pad(jnp.flip(bias, axis=1), around, constant_values=hidden)
    # The band has L = `length` numbers and is repeated once for every query. If the repeated
    # numbers are read as rows of L - 1 numbers, the band begins in each row one place later than in
    # the row before.
    shifted = jnp.tile(band, (1, rows))[:, : rows * (length - 1)]
    return shifted.reshape(-1, rows, length - 1)[..., :columns]
