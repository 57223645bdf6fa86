"""MLPs of which each token has some of its own (experts): a router chooses them by token.

The rows of all tokens, one for each expert that a token has, are sorted by expert and cut into
tiles, which are multiplied with the weights of their expert one after another. The last tile of an
expert is filled up with rows of zeros, so that no token is dropped. On CPUs, this takes a third to
a seventh of the time of multiplying all tokens with all experts, and `jax.lax.ragged_dot` does the
latter there.

In shapes, E is the number of experts, C of experts of a token, F the width of an expert, and N of
rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.dense import activation, dense
from brt.ops.reductions import add_shared

# Returns the hidden units [N, F] of a gated MLP from its two projections.
Unit = Callable[[Array, Array], Array]
_GAIN = 1.702  # of the sigmoid of gpt-oss


class ExpertWeights(NamedTuple):
    """The weights of a router and of its experts; no biases if they are None."""

    router: Float[Array, "D E"]
    router_bias: Float[Array, " E"] | None
    into: Float[Array, "E D F"]
    into_bias: Float[Array, "E F"] | None
    gate: Float[Array, "E D F"]
    gate_bias: Float[Array, "E F"] | None
    out: Float[Array, "E F D"]
    out_bias: Float[Array, "E D"] | None


def gated_unit(hidden: Array, gate: Array, *, name: str, clamp: float) -> Array:
    """Returns `hidden` times the activation of the gate, or what `MLP.clamp` says."""
    if not clamp:
        return hidden * activation(gate, name)
    gate = jnp.minimum(gate, clamp)
    return (jnp.clip(hidden, -clamp, clamp) + 1) * gate * jax.nn.sigmoid(_GAIN * gate)


def route(
    logits: Float[Array, "*B E"], count: int, normalize: bool
) -> tuple[Int[Array, "*B C"], Float[Array, "*B C"]]:
    """Returns the C = `count` experts with the largest logits, and their float32 shares: their
    probabilities among all experts or, with `normalize`, among those of the token.
    """
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), count)
    return chosen, shares / jnp.sum(shares, axis=-1, keepdims=True) if normalize else shares


def apply_experts(
    x: Float[Array, "B T D"], weights: ExpertWeights, unit: Unit, count: int, normalize: bool,
    tokens: str | None = None,
) -> Float[Array, "B T D"]:  # fmt: skip
    """Returns the sum of the outputs of each token's experts, times their shares (`route`).

    `tokens` names the axis of tokens if it is sharded. Each device computes its own tokens with its
    own part of the width of all experts.
    """
    logits = dense(x, weights.router)
    if weights.router_bias is not None:
        logits = add_shared(logits, weights.router_bias)
    chosen, shares = route(logits, count, normalize)
    y = _on_each_device(x, chosen, shares, weights, unit, tokens)
    if weights.out_bias is None:
        return y
    by_expert = jnp.sum(jax.nn.one_hot(chosen, len(weights.out_bias)) * shares[..., None], axis=-2)
    return y + dense(by_expert.astype(y.dtype), weights.out_bias)


def _on_each_device(
    x: Float[Array, "B T D"], chosen: Int[Array, "B T C"], shares: Float[Array, "B T C"],
    weights: ExpertWeights, unit: Unit, tokens: str | None,
) -> Float[Array, "B T D"]:  # fmt: skip
    """Computes `apply_experts` without the bias of outputs."""
    experts = weights._replace(router=None, router_bias=None, out_bias=None)

    def on_device(
        x: Array, chosen: Array, shares: Array, experts: ExpertWeights, summed: Any = None
    ) -> Array:
        rows, *own = (z.reshape(-1, z.shape[-1]) for z in (x, chosen, shares))
        y = _by_expert(rows, *own, experts, unit).reshape(x.shape)
        return jax.lax.psum(y, summed) if summed else y

    if not rules.partitioned():
        return on_device(x, chosen, shares, experts)
    by_token = rules.partition_spec("lanes", tokens, None, shape=x.shape)
    into = rules.partition_spec(None, None, "mlp", shape=experts.into.shape)
    bias, out = P(None, into[2]), P(None, into[2], None)
    specs = ExpertWeights(None, None, into, bias, into, bias, out, None)
    call = dispatch.on_devices(
        partial(on_device, summed=into[2]), (by_token, by_token, by_token, specs), by_token
    )
    return call(x, chosen, shares, experts)


def _by_expert(
    x: Float[Array, "N D"], chosen: Int[Array, "N C"], shares: Float[Array, "N C"],
    weights: ExpertWeights, unit: Unit,
) -> Float[Array, "N D"]:  # fmt: skip
    def expert(inputs: tuple[Float[Array, "R D"], Int[Array, ""]]) -> Float[Array, "R D"]:
        rows, index = inputs
        own = jax.tree.map(lambda z: z[index], weights)
        hidden, gate = dense(rows, own.into), dense(rows, own.gate)
        if own.into_bias is not None:
            hidden, gate = add_shared(hidden, own.into_bias), add_shared(gate, own.gate_bias)
        return dense(unit(hidden, gate), own.out)

    count, experts, size = chosen.shape[1], len(weights.into), chosen.size
    if size <= experts:  # The weights of the chosen experts are fewer than those of all.
        y = jax.vmap(expert)((jnp.repeat(x, count, axis=0)[:, None], chosen.ravel()))
        return _weighted(y[:, 0], shares)
    tile = dispatch.for_backend(128, cpu=32)
    order = jnp.argsort(chosen.ravel())  # of rows by expert
    sizes = jnp.bincount(chosen.ravel(), length=experts)
    whole = -(-sizes // tile) * tile
    ends, by_expert = jnp.cumsum(whole), chosen.ravel()[order]
    # The place of each row in the tiles: after those of lower experts and its own earlier rows.
    place = jnp.arange(size) + (ends - whole - jnp.cumsum(sizes) + sizes)[by_expert]
    tiles = -(-size // tile) + experts
    rows = jnp.zeros((tiles * tile, x.shape[1]), x.dtype).at[place].set(x[order // count])
    owner = jnp.searchsorted(ends, tile * jnp.arange(tiles), side="right")
    y = jax.lax.map(
        jax.checkpoint(expert), (rows.reshape(tiles, tile, -1), jnp.minimum(owner, experts - 1))
    )
    places = jnp.zeros(size, place.dtype).at[order].set(place)
    return _weighted(y.reshape(rows.shape)[places], shares)


def _weighted(y: Float[Array, "M D"], shares: Float[Array, "N C"]) -> Float[Array, "N D"]:
    y = y.reshape(*shares.shape, -1)
    return jnp.einsum("ncd,nc->nd", y, shares.astype(y.dtype))
