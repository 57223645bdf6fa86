"""The scan over blocks that updates the states of the recurrent cell.

The weight gradients of the projection, of the output projection and of the MLP are computed once,
after the scan. They are computed from taps, which are arrays that collect a product's inputs and
output gradients from all steps (`brt.ops.deferred`). Only the gradients of the weights of lstm and
gru gates are summed block by block. The module `cell` explains the axes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from brt.distributed.rules import constrain
from brt.ops import deferred
from brt.ops.deferred import Tap
from brt.ops.dense import relu
from brt.ops.gates import gate
from brt.ops.normalization import rms_norm
from brt.ops.recurrent_attention.cell import CellWeights, StateKV, TokenKV, tokens_by_head
from brt.ops.tpu import materialized


class _Kernels(NamedTuple):
    """The weights of the large products of a state update, or their taps for deferred gradients."""

    projection: Array | Tap
    output: Array | Tap | None
    mlp_in: Array | Tap | None
    mlp_out: Array | Tap | None


def _kernels(weights: CellWeights) -> _Kernels:
    return _Kernels(_stacked_projection(weights), weights.output, weights.mlp_in, weights.mlp_out)


def _stacked_projection(weights: CellWeights, dtype: Any = jnp.float32) -> Float[Array, "D 4 H K"]:
    """Returns the weights of the product that computes keys, both kinds of queries, and values."""
    parts = weights.keys, weights.queries, weights.cross_queries, weights.values
    return jnp.stack([part.astype(dtype) for part in parts], axis=1)


_NO_TAPS = _Kernels(None, None, None, None)


def _input_axes(kernels: _Kernels) -> _Kernels:
    """Returns, for each kernel, the number of axes over which the product with the kernel sums."""
    return _Kernels(1, *(k if k is None else jnp.ndim(k) - 1 for k in kernels[1:]))


def state_update(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    before: TokenKV,
    own: TokenKV,
    cache_mask: Bool[Array, " B"],
    kernels: _Kernels | None = None,
    taps: _Kernels | None = None,
    *,
    kind: str,
    read: Callable[..., tuple[Array, StateKV]],
    **options: bool | str | None,
) -> tuple[Float[Array, "B S D"], StateKV]:
    """Returns the states after one block, float32, and the keys and values that its tokens read.

    Args:
      before, own: keys and values of the tokens of the previous block and of this block.
      cache_mask: True if the previous block may be read.
      kernels, taps: what `state_scan` prepares once for all blocks; other callers leave them None.
      kind: as for `api.state_scan`.
      read: a function such as `xla.state_attention` that computes the attention of the states; it
        gets `options`.
    """
    kernels = kernels or _kernels(weights)
    taps = taps or _NO_TAPS
    h = (rms_norm(vectors, weights.norm) + weights.ids[None]).astype(own.keys.dtype)
    projected = deferred.dot(materialized(h), kernels.projection, taps.projection)
    projected = constrain(projected, "lanes", None, None, "heads", None)
    scales = jnp.stack([weights.scale, weights.cross_scale])
    attended, states = read(projected, scales, before, own, cache_mask, **options)
    return _apply_gates(weights, vectors, attended, kernels, taps, kind), states


def _apply_gates(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    attended: Float[Array, "B S 2 H K"],
    kernels: _Kernels,
    taps: _Kernels,
    kind: str,
) -> Float[Array, "B S D"]:
    """Returns the next states; the weights that are not None determine the layout (see `cell`)."""
    single, inputs = weights.output is None, _input_axes(kernels)

    def states_after_mlp(x: Float[Array, "B S *M"]) -> Float[Array, "B S D"]:
        hidden = relu(deferred.dot(x, kernels.mlp_in, taps.mlp_in, inputs.mlp_in))
        hidden = constrain(hidden, "lanes", None, "mlp")
        z = deferred.dot(hidden, kernels.mlp_out, taps.mlp_out)
        # As in the authors' code, only the single layout bounds the update (by tanh).
        return gate(kind, weights.mlp_gate, vectors, jnp.tanh(z) if single else z, hidden)

    if single:
        return states_after_mlp(attended)
    z = deferred.dot(attended, kernels.output, taps.output, inputs.output)
    z = constrain(z, "lanes", None, None)
    vectors = gate(kind, weights.output_gate, vectors, z, attended)
    if weights.mlp_in is None:
        return vectors
    return states_after_mlp(rms_norm(vectors, weights.mlp_norm).astype(attended.dtype))


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
    unroll: int = 1,
    **options: Any,
) -> tuple[Float[Array, "B S D"], StateKV]:
    """Implements `api.state_scan`; `options` also has the argument `read` of `state_update`."""
    batch, blocks = cache_mask.shape
    kernels, rows = _kernels(weights), (blocks, batch, vectors.shape[1])
    pairs = zip(kernels, _input_axes(kernels), strict=True)
    taps = _Kernels(*(k if k is None else deferred.tap(k, rows, keys.dtype, i) for k, i in pairs))
    # The four weights of the projection are stacked, converted to the dtype of the keys and stored
    # once, before the scan. The converted copy needs no gradient, because the weight gradient is
    # computed from the tap.
    kernels = kernels._replace(projection=materialized(_stacked_projection(weights, keys.dtype)))

    # The carry has the states, and the keys and values of the previous block's tokens.
    def update_block(
        carry: tuple[Float[Array, "B S D"], TokenKV],
        block: tuple[TokenKV, Array, Array, _Kernels],
    ) -> tuple[tuple[Float[Array, "B S D"], TokenKV], StateKV]:
        s, before = carry
        own, may_read, starts, block_taps = block
        s = _reset_states(starts, initial, s)
        s, states = state_update(weights, s, before, own, may_read, kernels, block_taps, **options)
        return (s, own), states

    starts = tokens_by_head(*cached)
    flags = cache_mask.T, document_start.T
    # `jax.lax.scan` needs the blocks on axis 0 of its arrays, so the arrays must be transposed. If
    # all blocks are unrolled, a Python loop over slices is used instead and needs no transposes.
    if unroll >= blocks:
        cut = zip(*(jnp.split(x, blocks, axis=1) for x in (keys, values)), strict=True)
        tokens = [tokens_by_head(*pair) for pair in cut]
        state_kvs, carry = [], (vectors, starts)
        for own, *others in zip(tokens, *flags, _unstack(taps, blocks), strict=True):
            carry, states = update_block(carry, (own, *others))
            state_kvs.append(states)

        def stacked(*parts: Float[Array, "B S H K"]) -> Float[Array, "B N S H K"]:
            # The array is stored as attention to the states reads it: heads before states.
            return jnp.stack([x.swapaxes(1, 2) for x in parts], axis=1).swapaxes(2, 3)

        return carry[0], jax.tree.map(stacked, *state_kvs)

    def split_blocks(x: Float[Array, "B T H K"]) -> Float[Array, "N B W H K"]:
        return jnp.moveaxis(x.reshape(batch, blocks, -1, *x.shape[2:]), 1, 0)

    xs = tokens_by_head(split_blocks(keys), split_blocks(values)), *flags, taps
    (vectors, _), states = jax.lax.scan(update_block, (vectors, starts), xs, unroll=unroll)
    return vectors, StateKV(*(jnp.moveaxis(x, 0, 1) for x in states))


@jax.custom_vjp
def _reset_states(
    starts: Bool[Array, " B"], initial: Float[Array, "S D"], vectors: Float[Array, "B S D"]
) -> Float[Array, "B S D"]:
    """Replaces the states by the initial ones where a document starts."""
    return jnp.where(starts[:, None, None], initial[None], vectors)


def _reset_states_backward(
    starts: Bool[Array, " B"], gradient: Float[Array, "B S D"]
) -> tuple[None, Array, Array]:
    # Autodiff would save a flag for each number of the states, instead of one for each row.
    restarts = starts[:, None, None]
    return None, jnp.sum(jnp.where(restarts, gradient, 0), axis=0), jnp.where(restarts, 0, gradient)


_reset_states.defvjp(lambda starts, *x: (_reset_states(starts, *x), starts), _reset_states_backward)


def _unstack(tree: PyTree[Array], count: int) -> list[PyTree[Array]]:
    """Splits all arrays along axis 0 in one operation.

    The backward pass of this operation stacks the gradients of the parts. The gradients of separate
    slices would be padded and summed.
    """
    leaves, structure = jax.tree.flatten(tree)
    parts = zip(*map(jnp.unstack, leaves), strict=True) if leaves else [()] * count
    return [jax.tree.unflatten(structure, part) for part in parts]
