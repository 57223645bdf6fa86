"""The state update, block after block; its weight gradients are computed once, after the scan."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from brt.distributed.rules import constrain
from brt.ops import deferred
from brt.ops.activations import relu
from brt.ops.deferred import LayerTaps, Tap
from brt.ops.gates import gate
from brt.ops.normalization import rms_norm
from brt.ops.recurrent_attention.cell import CellWeights, StateKV, Tokens, tokens_by_head
from brt.ops.tpu import materialized


class _Kernels(NamedTuple):
    """The large products of a state update: kernels, or their taps (`brt.ops.deferred`)."""

    projection: Array | Tap | LayerTaps
    output: Array | Tap | LayerTaps | None
    mlp_in: Array | Tap | LayerTaps | None
    mlp_out: Array | Tap | LayerTaps | None


def _kernels(weights: CellWeights) -> _Kernels:
    return _Kernels(_projection(weights), weights.output, weights.mlp_in, weights.mlp_out)


def _projection(weights: CellWeights, dtype: Any = jnp.float32) -> Float[Array, "D 4 H K"]:
    """The kernel of the one product that makes keys, both queries and values."""
    parts = weights.keys, weights.queries, weights.cross_queries, weights.values
    return jnp.stack([part.astype(dtype) for part in parts], axis=1)


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

    def of(kernel: Array | None, inputs: int | None) -> LayerTaps | None:
        return None if kernel is None else deferred.layer_taps((kernel,), rows, dtype, inputs)

    one = jax.tree.map(lambda kernel: kernel[0], kernels)
    return _Kernels(*map(of, kernels, _inputs(one)))


def state_update(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    before: Tokens,
    own: Tokens,
    cache_mask: Bool[Array, " B"],
    kernels: _Kernels | None = None,
    taps: _Kernels | None = None,
    *,
    kind: str,
    tanh: str,
    read: Callable[..., tuple[Array, StateKV]],
    **options: bool | str | None,
) -> tuple[Float[Array, "B S D"], StateKV]:
    """One block: the states after it, and the memory of the states before it.

    Args:
      vectors: float32.
      before, own: the tokens of the previous block, and of this one.
      cache_mask: whether the previous block may be read.
      kernels, taps: given by `state_scan` only.
      kind: 'fixed', 'lstm' or 'gru'.
      tanh: 'original' (on the update of the single layout) or 'paper' (of lstm gates).
      read: both attentions, as `xla.state_attention`.
      options: of `read`.
    """
    kernels = kernels or _kernels(weights)
    taps = taps or _NO_TAPS
    h = (rms_norm(vectors, weights.norm) + weights.ids[None]).astype(own.keys.dtype)
    projected = deferred.dot(materialized(h), kernels.projection, taps.projection)
    projected = constrain(projected, "lanes", None, None, "heads", None)
    scales = jnp.stack([weights.scale, weights.cross_scale])
    attended, memory = read(projected, scales, before, own, cache_mask, **options)
    return _gated(weights, vectors, attended, kernels, taps, kind, tanh), memory


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


def state_scan(
    weights: CellWeights,
    initial: Float[Array, "S D"],
    vectors: Float[Array, "B S D"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    cache_mask: Bool[Array, "B N"],
    document_start: Bool[Array, "B N"],
    *,
    taps: _Kernels | None = None,
    unroll: int = 1,
    **options: Any,
) -> tuple[Float[Array, "B S D"], StateKV]:
    """See `api.state_scan`; further options are those of `state_update`."""
    batch, blocks = cache_mask.shape
    kernels, rows = _kernels(weights), (blocks, batch, vectors.shape[1])
    if taps is None:
        pairs = zip(kernels, _inputs(kernels), strict=True)
        taps = _Kernels(
            *(k if k is None else deferred.tap((k,), rows, keys.dtype, i) for k, i in pairs)
        )
    else:
        taps = jax.tree.map(lambda part: part[None], taps)
    if taps.projection is not None:  # whose gradient goes another way
        kernels = kernels._replace(projection=materialized(_projection(weights, keys.dtype)))

    def body(
        carried: tuple[Float[Array, "B S D"], Tokens],
        block: tuple[Tokens, Array, Array, _Kernels],
    ) -> tuple[tuple[Float[Array, "B S D"], Tokens], StateKV]:
        s, before = carried
        own, may_read, starts, block_taps = block
        s = _begun_anew(starts, initial, s)
        s, memory = state_update(weights, s, before, own, may_read, kernels, block_taps, **options)
        return (s, own), memory

    starts = tokens_by_head(*cached)
    flags = cache_mask.T, document_start.T
    if unroll >= blocks:  # without a loop nothing is moved to where blocks are the first axis
        cut = zip(*(jnp.split(x, blocks, axis=1) for x in (keys, values)), strict=True)
        tokens = [tokens_by_head(*pair) for pair in cut]
        shown, carried = [], (vectors, starts)
        for own, *others in zip(tokens, *flags, _unstacked(taps, blocks), strict=True):
            carried, memory = body(carried, (own, *others))
            shown.append(memory)
        return carried[0], jax.tree.map(lambda *parts: jnp.stack(parts, axis=1), *shown)

    def by_block(x: Float[Array, "B T H K"]) -> Float[Array, "N B W H K"]:
        return jnp.moveaxis(x.reshape(batch, blocks, -1, *x.shape[2:]), 1, 0)

    xs = tokens_by_head(by_block(keys), by_block(values)), *flags, taps
    (vectors, _), memory = jax.lax.scan(body, (vectors, starts), xs, unroll=unroll)
    return vectors, StateKV(*(jnp.moveaxis(m, 0, 1) for m in memory))


@jax.custom_vjp
def _begun_anew(
    starts: Bool[Array, " B"], initial: Float[Array, "S D"], vectors: Float[Array, "B S D"]
) -> Float[Array, "B S D"]:
    """The initial states where a document starts. Autodiff would keep a flag for each number."""
    return jnp.where(starts[:, None, None], initial[None], vectors)


def _begun_anew_backward(
    starts: Bool[Array, " B"], gradient: Float[Array, "B S D"]
) -> tuple[None, Array, Array]:
    anew = starts[:, None, None]
    return None, jnp.sum(jnp.where(anew, gradient, 0), axis=0), jnp.where(anew, 0, gradient)


_begun_anew.defvjp(lambda starts, *x: (_begun_anew(starts, *x), starts), _begun_anew_backward)


def _unstacked(tree: PyTree[Array], count: int) -> list[PyTree[Array]]:
    """Of each of the first axis; their gradients are joined, not padded and added up."""
    leaves, structure = jax.tree.flatten(tree)
    parts = zip(*map(jnp.unstack, leaves), strict=True) if leaves else [()] * count
    return [jax.tree.unflatten(structure, part) for part in parts]
