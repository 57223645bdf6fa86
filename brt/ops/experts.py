"""Mixture of experts: a router chooses MLPs (experts) for each token, and no token is dropped.

Every token has one row for each of its experts. The rows are sorted by expert and cut into tiles of
one expert each. The tiles are multiplied with the weights of their experts one after another.
`jax.lax.ragged_dot` is not used, because on CPUs it multiplies all tokens with all experts.

In shapes, E is the number of experts, C the number of experts of a token, D the number of features
of a token, F the number of hidden units, N the number of tokens, and R the number of rows of a
tile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.dense import activation, dense
from brt.ops.reductions import add_shared

Unit: TypeAlias = Callable[[Array, Array], Array]  # `gated_unit` with its settings


class ExpertWeights(NamedTuple):
    """The weights of a router and of its experts."""

    router: Float[Array, "D E"]
    router_bias: Float[Array, " E"] | None
    into: Float[Array, "E D F"]
    into_bias: Float[Array, "E F"] | None
    gate: Float[Array, "E D F"]
    gate_bias: Float[Array, "E F"] | None
    out: Float[Array, "E F D"]
    out_bias: Float[Array, "E D"] | None


def gated_unit(hidden: Array, gate: Array, *, name: str, clamp: float) -> Array:
    """Returns `hidden` times the activation `name` of `gate`.

    If `clamp` is not 0, the result is computed as in gpt-oss instead, and `name` has no effect.
    """
    if not clamp:
        return hidden * activation(gate, name)
    gate = jnp.minimum(gate, clamp)
    return (jnp.clip(hidden, -clamp, clamp) + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def route(
    logits: Float[Array, "*B E"], count: int, normalize: bool
) -> tuple[Int[Array, "*B C"], Float[Array, "*B C"]]:
    """Returns the C = `count` most probable experts and their shares.

    The shares are the float32 probabilities of these experts. If `normalize`, they are divided by
    their sum.
    """
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), count)
    return chosen, shares / jnp.sum(shares, axis=-1, keepdims=True) if normalize else shares


def apply_experts(
    x: Float[Array, "B T D"], weights: ExpertWeights, unit: Unit, count: int, normalize: bool,
    tokens: str | None = None,
) -> Float[Array, "B T D"]:  # fmt: skip
    """Returns, for each token, the sum of its experts' outputs, weighted by their shares (`route`).

    `tokens` is the logical name of the axis of tokens if it is sharded. Each device computes its
    own tokens with its own part of the hidden units of all experts.
    """
    logits = dense(x, weights.router)
    if weights.router_bias is not None:
        logits = add_shared(logits, weights.router_bias)
    chosen, shares = route(logits, count, normalize)
    experts = weights._replace(router=None, router_bias=None)
    if weights.out_bias is not None:  # Each device adds a part of the bias.
        parts = rules.shard_count("mlp", weights.out.shape[1])
        experts = experts._replace(out_bias=weights.out_bias / parts)

    def on_device(
        x: Array, chosen: Array, shares: Array, experts: ExpertWeights, summed: Any = None
    ) -> Array:
        y = _by_expert(x.reshape(-1, x.shape[-1]), chosen.ravel(), experts, unit)
        y = jnp.einsum("btcd,btc->btd", y.reshape(*shares.shape, -1), shares.astype(y.dtype))
        return jax.lax.psum(y, summed) if summed else y

    if not rules.partitioned():
        return on_device(x, chosen, shares, experts)
    by_token = rules.partition_spec("lanes", tokens, None, shape=x.shape)
    *_, cut = into = rules.partition_spec(None, None, "mlp", shape=experts.into.shape)
    bias, out = P(None, cut), P(None, cut, None)
    specs = by_token, by_token, by_token, ExpertWeights(P(), P(), into, bias, into, bias, out, P())
    call = dispatch.on_devices(partial(on_device, summed=cut), specs, by_token)
    return call(x, chosen, shares, experts)


def _by_expert(
    x: Float[Array, "N D"], chosen: Int[Array, " NC"], weights: ExpertWeights, unit: Unit
) -> Float[Array, "NC D"]:
    # Returns the output of each expert of each token.
    def expert(inputs: tuple[Float[Array, "R D"], Int[Array, ""]]) -> Float[Array, "R D"]:
        rows, own = inputs[0], jax.tree.map(lambda z: z[inputs[1]], weights)
        hidden, gate = dense(rows, own.into), dense(rows, own.gate)
        if own.into_bias is None:
            return dense(unit(hidden, gate), own.out)
        hidden, gate = add_shared(hidden, own.into_bias), add_shared(gate, own.gate_bias)
        return add_shared(dense(unit(hidden, gate), own.out), own.out_bias)

    size, experts, tile = len(chosen), len(weights.into), dispatch.for_backend(128, cpu=32)
    count = size // len(x)
    if size <= experts:  # A copy of an expert for each row needs no more memory than all experts.
        return jax.vmap(expert)((jnp.repeat(x, count, axis=0)[:, None], chosen))[:, 0]
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=experts)
    whole = -(-sizes // tile) * tile
    ends, tiles = jnp.cumsum(whole), -(-size // tile) + experts
    # The indices of the sorted rows in the tiles. Every expert has as many tiles as it needs.
    places = jnp.arange(size) + (ends - whole - jnp.cumsum(sizes) + sizes)[chosen[order]]
    rows = jnp.zeros((tiles * tile, x.shape[1]), x.dtype).at[places].set(x[order // count])
    owners = jnp.searchsorted(ends, tile * jnp.arange(tiles), side="right")
    owners = jnp.minimum(owners, experts - 1)  # Tiles at the end are not used.
    y = jax.lax.map(jax.checkpoint(expert), (rows.reshape(tiles, tile, -1), owners))
    return y.reshape(rows.shape)[places[jnp.argsort(order)]]
