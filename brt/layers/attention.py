"""The token side of a layer: the attention of tokens to windows and recurrent states, and the MLP.

`brt.layers.state` explains open blocks and the letters of shapes. S is the number of recurrent
states or the number of sinks.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Kernels, Model
from brt.distributed.rules import constrain, shard_count
from brt.layers.basic import (
    FROM_HEADS,
    INTO_HEADS,
    INTO_KEY_HEADS,
    MLP,
    ONES,
    SHARED,
    ZEROS,
    NormWeights,
    dropout,
    kernel_init,
    norm_parameters,
    normed,
    parameter,
    product_kernel,
    residual,
    zero_for_states,
)
from brt.layers.cache import (
    KVCache,
    TokenProjections,
    document_places,
    rotated_at,
    speeds_of,
    updated_sinks,
    window_part,
)
from brt.layers.sections import Recurrence
from brt.layers.state import (
    Given,
    LocalState,
    NewEntries,
    OpenBlock,
    Sinks,
    WindowState,
    cache_is_readable,
    cache_of,
    has_null_keys,
)
from brt.ops import dispatch
from brt.ops.dense import LayerKernel, dense
from brt.ops.dropout import Dropout
from brt.ops.normalization import l2_normalize, scaled_unit
from brt.ops.partial_attention import AttentionPart, with_zero_values
from brt.ops.positions import alibi_bias, relative_bias
from brt.ops.recurrent_attention import StateKV
from brt.ops.reductions import add_shared
from brt.ops.sink_attention import with_sinks
from brt.ops.softmax_attention import attend
from brt.ops.window_attention import ReadyRing, ready_ring, ring_attention, ring_places

# The type of a function that adds attention to keys beyond the window. Its arguments are the scaled
# queries [B, T, H, K] and their attention to the window. It returns one output [B, T, H, K] for all
# keys. This is the output of one softmax over all keys, or a mixture of two attentions whose
# weights a gate computes.
Mix = Callable[[Array, AttentionPart], Array]


class TransformerBlock(nn.Module):
    """Pre-norm attention of tokens to their window and, with `cross_attends`, to recurrent states,
    followed by an MLP.

    `project` and `attend` are separate methods because between the two calls, the recurrent states
    attend to the tokens' keys and values. Weights have an axis of heads: [D, H, K] from tokens to
    heads, and [n, H, K, D] from the outputs of n attentions to tokens. If heads are sharded, a
    device holds the same heads of all weights, so only the last product is summed over devices.
    """

    model: Model
    cross_attends: bool = False
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        m = self.model
        by_head = (m.model_dim, m.heads, m.head_dim)
        by_key_head = (m.model_dim, m.key_heads, m.head_dim)
        if m.norm.before:
            self.norm = norm_parameters(self, m, "norm")
        self.queries = product_kernel(self, m, "queries", by_head, INTO_HEADS)
        self.keys = product_kernel(self, m, "keys", by_key_head, INTO_KEY_HEADS)
        self.values = product_kernel(self, m, "values", by_key_head, INTO_KEY_HEADS)
        if m.attention.bias != "none":
            self.queries_bias = parameter(self, "queries_bias", by_head[1:], INTO_HEADS[1:], ZEROS)
            shape, axes = by_key_head[1:], INTO_KEY_HEADS[1:]
            self.keys_bias = parameter(self, "keys_bias", shape, axes, ZEROS)
            self.values_bias = parameter(self, "values_bias", shape, axes, ZEROS)
        if m.attention.bias == "all":
            self.output_bias = parameter(self, "output_bias", (m.model_dim,), ("embed",), ZEROS)
        if m.norm.queries_keys != "none":
            first = 0 if m.norm.queries_keys == "heads" else 1
            shapes = (by_head[1:], INTO_HEADS[1:]), (by_key_head[1:], INTO_KEY_HEADS[1:])
            self.queries_norm, self.keys_norm = (
                norm_parameters(self, m, name, shape[first:], axes[first:])
                for name, (shape, axes) in zip(("queries_norm", "keys_norm"), shapes, strict=True)
            )
        if m.norm.after:
            self.output_norm = norm_parameters(self, m, "output_norm")
        scale = nn.initializers.constant(m.attention.scale_init)
        if m.attention.normalize_qk:
            self.scale = parameter(self, "scale", (m.heads,), ("heads",), scale)
        if m.attention.learned_sink:
            self.sink_logits = parameter(self, "sink_logits", (m.heads,), ("heads",), ZEROS)
        if self.cross_attends:
            self.cross_queries = product_kernel(self, m, "cross_queries", by_head, INTO_HEADS)
            if m.attention.normalize_qk:
                self.cross_scale = parameter(self, "cross_scale", (m.heads,), ("heads",), scale)
        if m.positions == "t5":
            self.relative_bias = parameter(
                self, "relative_bias", (m.heads, m.relative_buckets), ("heads", "buckets"),
                nn.initializers.normal(m.relative_buckets**-0.5),
            )  # fmt: skip
        if m.positions == "alibi":
            self.alibi_scale = parameter(self, "alibi_scale", (), (), ONES)
            self.alibi_bound = parameter(self, "alibi_bound", (1,), ("buckets",), ONES)
        attended, init = (1 + self.cross_attends, m.heads, m.head_dim, m.model_dim), kernel_init(3)
        if self.cross_attends and m.of(Recurrence).output_init == "zero":
            init = zero_for_states(init)
        self.output = product_kernel(self, m, "output", attended, FROM_HEADS, init)
        self.mlp = MLP(m, self.training)
        nn.share_scope(self, self.mlp)  # The MLP's parameters become parameters of this module.

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns x after norm and dropout: the input of the projections."""
        if self.model.norm.before:
            x = normed(self.model, x, self.norm)
        return dropout(self, x, self.model.dropout)

    def project(self, x: Float[Array, "B T D"]) -> TokenProjections:
        """Returns the projections of the inputs x, before queries and keys are normalised."""
        h, kernels = self.normed(x), [self.queries, self.keys]
        if self.cross_attends:
            kernels.append(self.cross_queries)
        kernels.append(self.values)
        tokens = self._token_axis(h)

        # The products are separate, because splitting a joint product would copy its parts.
        def product(kernel: Array | LayerKernel) -> Float[Array, "B T H K"]:
            heads = "heads" if kernel.shape[1] == self.model.heads else "kv_heads"
            return constrain(dense(h, kernel), "lanes", tokens, heads, None)

        queries, keys, *cross, values = map(product, kernels)
        if self.model.attention.bias != "none":
            queries = add_shared(queries, self.queries_bias)
            keys = add_shared(keys, self.keys_bias)
            values = add_shared(values, self.values_bias)
        return TokenProjections(queries, keys, values, cross[0] if cross else None, x)

    def project_kv(self, z: Float[Array, "B S D"], *, learns: bool = True) -> StateKV:
        """Returns keys (normalised) and values of vectors that are not tokens, such as summaries of
        blocks. If `learns` is False, the weights are treated as constants.
        """
        weights = self.norm if self.model.norm.before else None, self.keys, self.values
        norm, of_keys, of_values = weights if learns else jax.lax.stop_gradient(weights)
        h = z if norm is None else normed(self.model, z, norm)
        h = dropout(self, h, self.model.dropout)
        return StateKV(self.normalized_keys(dense(h, of_keys)), dense(h, of_values))

    def normalized_keys(self, keys: Float[Array, "*B G K"]) -> Float[Array, "*B G K"]:
        """Returns keys, normalised if the settings ask for it, without rotary positions."""
        m = self.model
        if m.norm.queries_keys != "none":
            return _normed_heads(m, keys, self.keys_norm)
        return l2_normalize(keys) if m.attention.normalize_qk else keys

    def by_query_head(
        self,
        keys: Float[Array, "B T G K"],
        values: Float[Array, "B T G K"],
        *,
        normalize: bool = False,
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"]]:
        """Returns keys and values, with each head repeated for all heads of queries that it serves.

        With `SelfAttention.normalize_qk`, keys are normalised only if `normalize` is True. If
        `normalize` is False, the operation that reads the keys must normalise them.
        """
        if normalize or not self.model.attention.normalize_qk:
            keys = self.normalized_keys(keys)
        members = self.model.heads // keys.shape[2]
        if members == 1:
            return keys, values
        return jnp.repeat(keys, members, axis=2), jnp.repeat(values, members, axis=2)

    def scaled_queries(
        self, queries: Float[Array, "B T H K"], name: str = "scale"
    ) -> Float[Array, "B T H K"]:
        """Returns the queries, normalised if the settings ask for it, times `query_scale(name)`."""
        m = self.model
        if m.attention.normalize_qk:
            return scaled_unit(queries, self.query_scale(name))
        if m.norm.queries_keys != "none":
            queries = _normed_heads(m, queries, self.queries_norm)
        return queries * self.query_scale(name).astype(queries.dtype)[None, None, :, None]

    def query_scale(self, name: str = "scale") -> Float[Array, " H"]:
        """Returns the factor by which each head multiplies its queries.

        With `SelfAttention.normalize_qk`, it is the absolute value of the parameter `name`. In
        other models, it is the setting `SelfAttention.query_scale`, or 1/sqrt(K) if the setting is
        0.
        """
        m = self.model
        if m.attention.normalize_qk:
            return jnp.abs(getattr(self, name))
        return jnp.full((m.heads,), m.attention.query_scale or m.head_dim**-0.5)

    def bias(self, reach: int | None = None) -> Float[Array, "H W"] | None:
        """Returns the position bias of the `reach` nearest keys, nearest first; None if the kind of
        positions has no bias. By default, `reach` is W.
        """
        m, reach = self.model, reach or self.model.window
        if m.positions == "t5":
            bias = relative_bias(
                self.relative_bias, window=reach, attend_to_self=m.sliding.attend_to_self,
                max_distance=m.relative_max_distance,
            )  # fmt: skip
        elif m.positions == "alibi":
            bias = alibi_bias(
                self.alibi_scale, self.alibi_bound, heads=m.heads, window=reach,
                attend_to_self=m.sliding.attend_to_self,
            )  # fmt: skip
        else:
            return None
        if m.attention.bias_before_scale and m.attention.normalize_qk:
            bias = bias * jnp.abs(self.scale)[:, None]
        return bias

    def far_bias(self) -> Float[Array, " H"]:
        """Returns the bias of keys beyond the window, which equals the bias of the window's
        farthest key; the bias is 0 if the kind of positions has none.
        """
        bias = self.bias()
        return jnp.zeros((self.model.heads,)) if bias is None else bias[:, -1]

    def attend(
        self,
        projections: TokenProjections,
        past: KVCache,
        memory: StateKV | None,
        mix: Mix | None = None,
        *,
        residual: Float[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the layer's output for a segment.

        Args:
          memory: keys and values [B, N, S, H, K] of the recurrent states that each block reads.
          mix: adds attention to keys beyond the window (see `Mix`); None if there are none.
          residual: the vectors to which the layer adds its output; None stands for
            `projections.residual`.
        """
        m = self.model
        x = projections.residual if residual is None else residual
        drops, own = m.dropout and self.training, projections
        # With `normalize_qk`, `window_part` normalises and scales queries and keys. Otherwise it
        # does neither, so the settings `Norm.queries_keys` and `query_scale` are applied here.
        if not m.attention.normalize_qk:
            own = own._replace(
                queries=self.scaled_queries(own.queries), keys=self.normalized_keys(own.keys)
            )
            past = past._replace(keys=self.normalized_keys(past.keys))
        part = window_part(
            m, own, past, self.bias(),
            scale=self.query_scale() if m.attention.normalize_qk else None,
            dropout=Dropout(self.make_rng(SHARED), m.dropout) if drops else None,
            kernels=self.kernels,
        )  # fmt: skip
        if past.sinks is not None:
            places = document_places(past, x.shape[1])
            part = self._with_sinks(part, projections.queries, past.sinks, places)
        if m.attention.learned_sink:
            part = with_zero_values(part, self.sink_logits[None, None])
        scaled = self.scaled_queries(projections.queries)
        attended = [part.output if mix is None else mix(scaled, part)]
        if memory is not None:
            attended.append(self._attend_to_states(projections.cross_queries, memory))
        return self.finish(x, attended)

    def _with_sinks(
        self, part: AttentionPart, queries: Float[Array, "B T H K"], sinks: Sinks,
        places: Int[Array, "B T"],
    ) -> AttentionPart:  # fmt: skip
        # Returns the attention of tokens to their window and to the sinks that have left it. `part`
        # is the attention to the window alone. `sinks` [B, N, S, G, K] has, for each block, the
        # sinks of the block's document. `places` are the places of the tokens in their document, 0
        # for the document's first token.
        m = self.model
        bias = None if m.positions in ("rotary", "none") else self.far_bias()
        return with_sinks(
            part, self.scaled_queries(queries), self.normalized_keys(sinks.keys), sinks.values,
            places, bias, farthest=m.window - 1 if m.sliding.attend_to_self else m.window,
            soft_cap=m.attention.soft_cap,
            speeds=speeds_of(m) if m.positions == "rotary" else None,
        )  # fmt: skip

    def _attend_to_states(
        self, queries: Float[Array, "B T H K"] | None, memory: StateKV
    ) -> Float[Array, "B T H K"]:
        assert queries is not None  # With `cross_attends`, `project` returns cross queries.
        scale = self.query_scale("cross_scale") if self.model.attention.normalize_qk else None
        if scale is None:
            queries = self.scaled_queries(queries, "cross_scale")
        return attend(queries, *memory, scale=scale, implementation=self.kernels.softmax_attention)

    def prepared(self, block: OpenBlock, position: Int[Array, " B"]) -> OpenBlock:
        """Returns an open block with `ready` set, after `position` of its tokens were read."""
        places = ring_places(self.model.window, position)
        keys = rotated_at(self.model, self.normalized_keys(block.keys), places)
        return block._replace(ready=ready_ring(keys, block.values))

    def attend_step(
        self,
        x: Float[Array, "B T D"],
        given: Given,
        mix: Mix | None = None,
        projections: TokenProjections | None = None,
    ) -> tuple[Float[Array, "B T D"], OpenBlock]:
        """Returns the layer's output for T tokens of a block, and the open block with their keys
        and values, as `NewEntries`.

        Args:
          x: the input of the layer for the tokens. If T > 1, T divides W and `position`, so that
            the tokens' entries in ring buffers are consecutive.
          given: `block` is the open block, `state` is the state before the block, and `position` is
            the position of the first token in the block. The cache in `state` says which entries
            of the open block belong to the document. `feedback` has the keys and values
            [B, S, H, K] of the recurrent states.
          mix: adds attention to keys beyond the window (see `Mix`); None if there are none.
          projections: the projections of the tokens; None stands for the result of `project` for x.
        """
        m, block, position = self.model, given.block, given.position
        window, own = cache_of(given.state), projections or self.project(x)
        ring = block.ready or self.prepared(block, position).ready
        here = position[:, None] + jnp.arange(x.shape[1])[None]
        scaled, unit = self.scaled_queries(own.queries), self.normalized_keys(own.keys)
        queries, keys = (rotated_at(m, z, here) for z in (scaled, unit))
        places = None
        if isinstance(window, LocalState):
            read = window.length * m.sliding.cache + position
            places = window.length[:, None] + here
        else:
            read = cache_is_readable(m, window) * m.window + position
        part = ring_attention(
            queries, ring, (keys, own.values), self.bias(), read, position,
            attend_to_self=m.sliding.attend_to_self, soft_cap=m.attention.soft_cap,
            null_keys=isinstance(window, WindowState) and has_null_keys(m),
        )  # fmt: skip
        slot, sinks = position % m.window, block.sinks
        if places is not None and sinks is not None:
            sinks = updated_sinks(sinks, own, places)
            by_block = Sinks(*(z[:, None] for z in sinks))
            part = self._with_sinks(part, own.queries, by_block, places)
        if m.attention.learned_sink:
            part = with_zero_values(part, self.sink_logits[None, None])
        after = block._replace(
            keys=NewEntries(own.keys, slot), values=NewEntries(own.values, slot), sinks=sinks
        )
        if block.ready is not None:
            ready = (NewEntries(z, slot) for z in ready_ring(keys, own.values))
            after = after._replace(ready=ReadyRing(*ready))
        attended = [part.output if mix is None else mix(scaled, part)]
        if given.feedback is not None:
            attended.append(self._attend_to_states(own.cross_queries, given.feedback))
        return self.finish(x, attended), after

    def _token_axis(self, x: Float[Array, "B T D"]) -> str | None:
        # Returns "tokens", the name of the axis of tokens, if the tokens can be divided among
        # devices in whole blocks, because attention needs whole blocks. Returns None otherwise.
        blocks = x.shape[1] // self.model.block_length
        return "tokens" if shard_count("blocks", blocks) > 1 else None

    def finish(
        self, x: Float[Array, "B T D"], attended: Sequence[Float[Array, "B T H K"]]
    ) -> Float[Array, "B T D"]:  # fmt: skip
        """Returns the layer's output: x, plus the projection of `attended`, plus the MLP's output.

        `attended` has the outputs of attention to the window and, in layers that attend to
        recurrent states, of attention to the states.
        """
        tokens = self._token_axis(x)
        attended = [constrain(part, "lanes", tokens, "heads", None) for part in attended]
        if len(attended) > 1 and dispatch.policy().multiplies_separately:
            kernels = jnp.unstack(self.output)
            y = sum(dense(part, kernel, 2) for part, kernel in zip(attended, kernels, strict=True))
        else:
            y = dense(jnp.stack(attended, axis=-3), self.output, 3)
        if self.model.attention.bias == "all":
            y = add_shared(y, self.output_bias)
        if self.model.norm.after:
            y = normed(self.model, y, self.output_norm)
        after = constrain(x + residual(self.model, y), "lanes", tokens, None)
        added = self.mlp(x if self.model.parallel else after, tokens)
        return constrain(after + added, "lanes", tokens, None)


def _normed_heads(
    model: Model, x: Float[Array, "*B H K"], weights: NormWeights
) -> Float[Array, "*B H K"]:
    if weights.scale.ndim == 1:
        return normed(model, x, weights)
    flat = jax.tree.map(jnp.ravel, weights)
    return normed(model, x.reshape(*x.shape[:-2], -1), flat).reshape(x.shape)
