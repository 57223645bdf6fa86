"""The state update in plain XLA; its weight gradients are computed once, after the scan."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.distributed.rules import constrain
from brt.ops import deferred
from brt.ops.activations import relu
from brt.ops.deferred import Tap
from brt.ops.gates import gate
from brt.ops.normalization import rms_norm, scaled_unit
from brt.ops.recurrent_attention.cell import CellWeights, StateMemory
from brt.ops.softmax_attention import attend, attend_to_blocks


class _Kernels(NamedTuple):
    """The large products of a state update: kernels, or their taps (`brt.ops.deferred`)."""

    projection: Array | Tap
    output: Array | Tap | None
    mlp_in: Array | Tap | None
    mlp_out: Array | Tap | None


def _kernels(weights: CellWeights) -> _Kernels:
    """Keys, both queries and values by one product with a kernel [D, 4, H, K]."""
    parts = (weights.keys, weights.queries, weights.cross_queries, weights.values)
    return _Kernels(jnp.stack(parts, axis=1), weights.output, weights.mlp_in, weights.mlp_out)


_NO_TAPS = _Kernels(None, None, None, None)


def _inputs(kernels: _Kernels) -> _Kernels:
    """How many axes each product sums over; all but the first have one axis of outputs."""
    return _Kernels(1, *(k if k is None else jnp.ndim(k) - 1 for k in kernels[1:]))


def state_taps(
    weights: CellWeights, blocks: int, vectors: tuple[int, int], dtype: jnp.dtype
) -> _Kernels:
    """What `state_scan` takes where a scan over blocks is around a scan over layers.

    Args:
      weights: of layers, which are on axis 0.
      vectors: lanes, and states of each.
    """
    kernels, rows = jax.vmap(_kernels)(weights), (blocks, *vectors)

    def of(kernel: Array | None, inputs: int | None) -> Tap | None:
        return None if kernel is None else deferred.stacked_tap((kernel,), rows, dtype, inputs)

    one = jax.tree.map(lambda kernel: kernel[0], kernels)
    return _Kernels(*map(of, kernels, _inputs(one)))


def state_update(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X K"],
    readable: Bool[Array, " B"],
    kernels: _Kernels | None = None,
    taps: _Kernels | None = None,
    *,
    kind: str,
    tanh: str,
    normalize_qk: bool,
    null_keys: bool,
    attention: str | None = None,
) -> tuple[Float[Array, "B S D"], StateMemory]:
    """One block: the states after it, and the memory of the states before it.

    Args:
      vectors: float32.
      keys, values: of the previous block and of this one, X = 2W.
      readable: whether the previous block may be read.
      kernels, taps: given by `state_scan` only.
      kind: 'fixed', 'lstm' or 'gru'.
      tanh: 'original' (on the update of the single layout) or 'paper' (of lstm gates).
      null_keys: an unreadable block counts as zero keys with zero values.
      attention: the implementation of both attentions.
    """
    kernels = kernels or _kernels(weights)
    taps = taps or _NO_TAPS
    dtype = keys.dtype
    h = rms_norm(vectors, weights.norm) + weights.ids[None]
    product = deferred.dot(h.astype(dtype), kernels.projection, taps.projection)
    product = constrain(product, "lanes", None, None, "heads", None)
    scaled, v = product[:, :, :-1], product[:, :, -1]
    scales = jnp.stack([jnp.ones_like(weights.scale), weights.scale, weights.cross_scale])
    if normalize_qk:
        scaled = scaled_unit(scaled, scales)
    else:
        scaled = scaled * scales.astype(dtype)[None, None, :, :, None]
    k, q, q_cross = (part.squeeze(2) for part in jnp.split(scaled, 3, axis=2))
    crossed = attend_to_blocks(
        q_cross, keys, values, readable, null_keys=null_keys, implementation=attention
    )
    attended = jnp.stack([attend(q, k, v, implementation=attention), crossed], axis=2)
    return _gated(weights, vectors, attended, kernels, taps, kind, tanh), StateMemory(k, v)


def _gated(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    attended: Float[Array, "B S 2 H K"],
    kernels: _Kernels,
    taps: _Kernels,
    kind: str,
    tanh: str,
) -> Float[Array, "B S D"]:
    """The dual, single or skip layout (section 3.6), told apart by the weights present."""
    single = weights.output is None
    bounded = single if tanh == "original" else kind == "lstm"
    bound = jnp.tanh if bounded else lambda z: z

    inputs = _inputs(kernels)

    def after_mlp(x: Float[Array, "B S *M"]) -> Float[Array, "B S D"]:
        hidden = relu(deferred.dot(x, kernels.mlp_in, taps.mlp_in, inputs.mlp_in))
        hidden = constrain(hidden, "lanes", None, "mlp")
        z = bound(deferred.dot(hidden, kernels.mlp_out, taps.mlp_out))
        return gate(kind, weights.mlp_gate, vectors, z, hidden)

    if single:
        return after_mlp(attended)
    z = bound(deferred.dot(attended, kernels.output, taps.output, inputs.output))
    z = constrain(z, "lanes", None, None)
    vectors = gate(kind, weights.output_gate, vectors, z, attended)
    if weights.mlp_in is None:
        return vectors
    return after_mlp(rms_norm(vectors, weights.mlp_norm).astype(attended.dtype))


def two_blocks(x: Float[Array, "B Z H K"], blocks: int) -> Float[Array, "N B H X K"]:
    """Of each block of the segment, the tokens of the block before it and its own: X = 2W."""
    batch, _, heads, size = x.shape
    cut = x.reshape(batch, blocks + 1, -1, heads, size).transpose(1, 0, 3, 2, 4)
    return jnp.concatenate([cut[:-1], cut[1:]], axis=3)


def state_scan(
    weights: CellWeights,
    initial: Float[Array, "S D"],
    vectors: Float[Array, "B S D"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    readable: Bool[Array, "B N"],
    document_start: Bool[Array, "B N"],
    *,
    taps: _Kernels | None = None,
    unroll: int = 1,
    **options: str | bool,
) -> tuple[Float[Array, "B S D"], StateMemory]:
    """See `api.state_scan`."""
    batch, blocks = readable.shape
    kernels, rows = _kernels(weights), (blocks, batch, vectors.shape[1])
    if taps is None:
        pairs = zip(kernels, _inputs(kernels), strict=True)
        taps = _Kernels(
            *(k if k is None else deferred.tap((k,), rows, keys.dtype, i) for k, i in pairs)
        )
    else:
        taps = jax.tree.map(lambda part: part[None], taps)

    def body(
        s: Float[Array, "B S D"], block: tuple[Array, Array, Array, Array, _Kernels]
    ) -> tuple[Float[Array, "B S D"], StateMemory]:
        k, v, may_read, starts, block_taps = block
        s = jnp.where(starts[:, None, None], initial[None], s)
        return state_update(weights, s, k, v, may_read, kernels, block_taps, **options)

    xs = (
        two_blocks(keys, blocks), two_blocks(values, blocks), readable.T, document_start.T, taps,
    )  # fmt: skip
    vectors, memory = jax.lax.scan(body, vectors, xs, unroll=min(unroll, blocks))
    return vectors, StateMemory(*(jnp.moveaxis(m, 0, 1) for m in memory))
