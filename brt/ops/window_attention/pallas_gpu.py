"""Window attention by the GPU kernels of `brt.ops.attention`, for windows of any length."""

from typing import Any

import jax.numpy as jnp

from brt.ops.attention import gpu
from brt.ops.attention.gpu_inputs import TILE, vector_parts
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import MASKED
from brt.ops.window_attention.inputs import WindowInputs, bias_band


def refusal(inputs: WindowInputs) -> str | None:
    if inputs.dropout is not None and inputs.window % TILE:
        return f"has dropout for windows of a multiple of {TILE} tokens, not of {inputs.window}"
    return gpu.refusal(inputs.queries, *[inputs.queries.shape[1]] * 2)


def window_attention(
    inputs: WindowInputs, *, attend_to_self: bool, interpret: Any = None
) -> AttentionPart:
    """Implements `api.local_attention`; `inputs.dropout` is None or a `DropoutMask`."""
    (tokens, heads), window = inputs.queries.shape[1:3], inputs.window
    nearest, missing = 0 if attend_to_self else 1, -window % TILE
    # The cache is padded in front to a multiple of TILE keys (`size`). No token sees the padding.
    padding = (0, 0), (missing, 0), (0, 0), (0, 0)
    inputs = inputs._replace(cached=tuple(jnp.pad(x, padding) for x in inputs.cached))
    queries, keys, values = inputs.queries, inputs.keys, inputs.values
    cached: tuple | None = inputs.cached
    scale, size = inputs.scale, inputs.window
    if vector_parts(queries) > 1:
        # If vectors are split into parts, the kernels cannot normalize them, and have no registers
        # for a second array of keys.
        queries, keys, values = inputs.joined()
        cached = scale = None
    # The first `size` keys are cached ones, so token t has key t + `size`. The last key of its
    # window is key t + `size` - `nearest`, and `end` is the index after it.
    end = jnp.arange(tokens)[None] + size - nearest + 1
    begin = jnp.maximum(end - window, inputs.starts() + size)
    spans = jnp.stack([begin, jnp.broadcast_to(end, begin.shape)], axis=1)
    # The strip has a tile of the bias for each distance between tiles of queries and keys.
    bias = jnp.zeros((heads, window)) if inputs.bias is None else inputs.bias
    bias = jnp.pad(bias, ((0, 0), (0, missing)), constant_values=MASKED)
    strip = bias_band(bias, TILE, size + TILE, nearest=nearest, hidden=MASKED)
    dropout = inputs.dropout
    return gpu.attend(
        queries, keys, values, spans, cached=cached, scale=scale,
        # The strip hides keys outside of the window, and the spans hide keys of other documents. If
        # windows consist of whole tiles and documents begin at tiles, the spans need not be applied
        # to single logits.
        whole_tiles=inputs.part % TILE == 0 and window % TILE == 0,
        bias=strip, by_distance=True, learned=inputs.bias is not None,
        factors=None if dropout is None else dropout.factors(jnp.dtype("float32")),
        interpret=interpret,
    )  # fmt: skip
