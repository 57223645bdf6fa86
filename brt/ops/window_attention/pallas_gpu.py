"""Window attention by the GPU kernels of `brt.ops.attention`, for windows of any length.

In shapes, G is the number of heads of keys and values, W of tokens of a window, Z = W + T of keys
with the W cached ones, and D of parts of a segment; documents start only at starts of parts.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.attention import gpu
from brt.ops.attention.gpu_inputs import TILE
from brt.ops.dropout import DropoutMask
from brt.ops.partial_attention import AttentionPart


def refusal(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]],
    keys: Any,
    values: Any,
    bias: Any,
    first: Any,
    dropout: Any = None,
    **_: Any,
) -> str | None:
    window = cached[0].shape[1]
    if dropout is not None and window % TILE:
        return f"has dropout for windows of a multiple of {TILE} tokens, not of {window}"
    return gpu.refusal(queries, *[queries.shape[1]] * 2)


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z G K"],
    values: Float[Array, "B Z G K"],
    bias: Float[Array, "H W"] | None,
    first: Int[Array, "B D"],
    dropout: DropoutMask | None = None,
    *,
    attend_to_self: bool,
    interpret: Any = None,
) -> AttentionPart:
    """Implements `api.window_part`; cached keys come first, and `first` replaces the cache mask.

    For each of D parts of the segment, `first` has the place of the first token of its document, a
    multiple of T / D (see `documents`).
    """
    tokens, heads = queries.shape[1:3]
    window, part = keys.shape[1] - tokens, tokens // first.shape[1]
    nearest = 0 if attend_to_self else 1
    # A token's window ends with the key `window - nearest` after its own place among the keys.
    end = jnp.arange(tokens)[None] + window - nearest + 1
    begin = jnp.maximum(end - window, jnp.repeat(first, part, axis=1) + window)
    spans = jnp.stack([begin, jnp.broadcast_to(end, begin.shape)], axis=1)
    strip = gpu.distance_strip(jnp.zeros((heads, window)) if bias is None else bias, nearest)
    padding = (0, 0), (0, -window % TILE), (0, 0), (0, 0)
    return gpu.attend(
        queries, jnp.pad(keys, padding), jnp.pad(values, padding), spans,
        # The strip hides keys outside of the window, but not those of other documents.
        whole_tiles=part % TILE == 0 and window % TILE == 0,
        bias=strip, by_distance=True, learned=bias is not None,
        factors=None if dropout is None else dropout.factors(jnp.dtype("float32")),
        interpret=interpret,
    )  # fmt: skip
