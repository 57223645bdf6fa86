"""The token side of a layer: attention of tokens to their window and to recurrent states, and the
MLP.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.distributed.rules import constrain, shard_count
from brt.layers.basic import (
    FROM_HEADS,
    INTO_HEADS,
    ONES,
    SHARED,
    ZEROS,
    dropout,
    kernel_init,
    parameter,
)
from brt.layers.state import (
    OpenBlock,
    WindowState,
    cache_is_readable,
    has_null_keys,
    zero_where_invalid,
)
from brt.layers.taps import NO_TAPS, TokenTaps
from brt.ops import deferred
from brt.ops.activations import relu
from brt.ops.dense import dense
from brt.ops.dropout import Dropout
from brt.ops.normalization import l2_normalize, rms_norm, scaled_unit
from brt.ops.partial_attention import AttentionPart
from brt.ops.positions import Rotation, alibi_bias, relative_bias, rotate, rotations
from brt.ops.recurrent_attention import StateKV
from brt.ops.reductions import add_shared
from brt.ops.softmax_attention import attend
from brt.ops.window_attention import (
    last_block,
    normalizes_in_kernel,
    segment_part,
    window_part_step,
)

# (queries [B, T, H, K], what they read in the window) -> that mixed with something else
Mix = Callable[[Array, AttentionPart], Array]


class RawProjections(NamedTuple):
    """Queries and keys before normalisation, for attention that normalises them itself.

    Attributes:
      queries, keys: [B, T, H, K].
      cross_queries: queries of the recurrent states, or None.
      handed: aliases of these keys and of the values that the next block reads. If blocks are read
        one after the other, the gradients of the aliases are added to those of this block before
        the backward pass of the projection.
    """

    queries: Float[Array, "B T H K"]
    keys: Float[Array, "B T H K"]
    cross_queries: Float[Array, "B T H K"] | None
    handed: tuple[Float[Array, "B T H K"], Float[Array, "B T H K"]]


class TokenProjections(NamedTuple):
    """Queries, keys and values of tokens; learned scales are folded into the queries.

    Attributes:
      queries, keys, values: [B, T, H, K].
      cross_queries: queries [B, T, H, K] for the recurrent states, or None.
      raw: the same before normalisation, if attention normalises in its kernel; None otherwise.
    """

    queries: Float[Array, "B T H K"]
    keys: Float[Array, "B T H K"]
    values: Float[Array, "B T H K"]
    cross_queries: Float[Array, "B T H K"] | None
    raw: RawProjections | None = None


class KVCache(NamedTuple):
    """The cached keys and values that the tokens of a segment attend to.

    Attributes:
      keys, values: [B, W, H, K], of the block before the segment.
      cache_mask: [B, N], True where block n may attend to the block before it.
    """

    keys: Float[Array, "B W H K"]
    values: Float[Array, "B W H K"]
    cache_mask: Bool[Array, "B N"]

    def joined(self, tokens: TokenProjections) -> tuple[Array, Array]:
        """Returns keys and values [B, W+T, H, K] of the cache and the segment, gathered on all
        devices that share the tokens.
        """
        names = ("lanes", None, "heads", None)
        pairs = (self.keys, tokens.keys), (self.values, tokens.values)
        keys, values = (jnp.concatenate([old, constrain(x, *names)], axis=1) for old, x in pairs)
        return keys, values


def _scaled(x: Float[Array, "B T H K"], scale: Float[Array, " H"]) -> Float[Array, "B T H K"]:
    return x * scale.astype(x.dtype)[None, None, :, None]


class TransformerBlock(nn.Module):
    """Pre-norm attention over the window and, optionally, over recurrent states, followed by an
    MLP.

    `project` and `attend` are separate methods because the recurrent states attend to the tokens'
    keys and values in between.

    Kernels have an axis of heads: [D, H, K] from tokens, [n, H, K, D] from n attentions. A device
    that holds some of the heads holds them of every kernel, so sharding heads moves no data.
    """

    model: Model
    cross_attends: bool = False
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        m = self.model
        by_head = (m.model_dim, m.heads, m.head_dim)
        self.norm = parameter(self, "norm", (m.model_dim,), ("embed",), ONES)
        self.queries = parameter(self, "queries", by_head, INTO_HEADS)
        self.keys = parameter(self, "keys", by_head, INTO_HEADS)
        self.values = parameter(self, "values", by_head, INTO_HEADS)
        scale = nn.initializers.constant(m.scale_init)
        if m.normalize_qk:
            self.scale = parameter(self, "scale", (m.heads,), ("heads",), scale)
        if self.cross_attends:
            self.cross_queries = parameter(self, "cross_queries", by_head, INTO_HEADS)
            if m.normalize_qk:
                self.cross_scale = parameter(self, "cross_scale", (m.heads,), ("heads",), scale)
        if m.positions == "t5":
            self.relative_bias = parameter(
                self, "relative_bias", (m.heads, m.relative_buckets), ("heads", "buckets"),
                nn.initializers.normal(m.relative_buckets**-0.5),
            )  # fmt: skip
        if m.positions == "alibi":
            self.alibi_scale = parameter(self, "alibi_scale", (), (), ONES)
            self.alibi_bound = parameter(self, "alibi_bound", (1,), ("buckets",), ONES)
        attended = (2 if self.cross_attends else 1, m.heads, m.head_dim)
        self.output = parameter(
            self, "output", (*attended, m.model_dim), FROM_HEADS, kernel_init(inputs=3)
        )
        self.mlp_norm = parameter(self, "mlp_norm", (m.model_dim,), ("embed",), ONES)
        self.mlp_in = parameter(self, "mlp_in", (m.model_dim, m.mlp_dim), ("embed", "mlp"))
        self.mlp_out = parameter(self, "mlp_out", (m.mlp_dim, m.model_dim), ("mlp", "embed"))
        if m.mlp_bias:
            self.mlp_in_bias = parameter(self, "mlp_in_bias", (m.mlp_dim,), ("mlp",), ZEROS)
            self.mlp_out_bias = parameter(self, "mlp_out_bias", (m.model_dim,), ("embed",), ZEROS)

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the normalised input from which queries, keys and values are made."""
        return dropout(self, rms_norm(x, self.norm), self.model.dropout)

    def project(self, x: Float[Array, "B T D"], taps: TokenTaps = NO_TAPS) -> TokenProjections:
        """Returns queries, keys and values of the tokens, each by a matrix product of its own;
        splitting one product would copy its parts.
        """
        m, h = self.model, self.normed(x)
        kernels, scales = [self.queries, self.keys], [self.query_scale(), jnp.ones((m.heads,))]
        if self.cross_attends:
            kernels.append(self.cross_queries)
            scales.append(self.query_scale("cross_scale"))
        kernels.append(self.values)
        again = () if taps.projections is None else (1, len(kernels) - 1)
        found = deferred.dots(h, kernels, taps.projections, again=again)
        names = ("lanes", self._along(h), "heads", None)
        found = tuple(constrain(product, *names) for product in found)
        (*products, values), handed = found[: len(kernels)], found[len(kernels) :]
        scaled = scaled_unit if m.normalize_qk else _scaled
        queries, keys, *cross = (scaled(*pair) for pair in zip(products, scales, strict=True))
        raw = None
        if m.normalize_qk and normalizes_in_kernel():
            crossing, handed = (products[2] if cross else None), handed or (products[1], values)
            raw = RawProjections(products[0], products[1], crossing, (handed[0], handed[1]))
        return TokenProjections(queries, keys, values, cross[0] if cross else None, raw)

    def project_kv(self, z: Float[Array, "B S D"], *, learns: bool = True) -> StateKV:
        """Returns keys and values [B, S, H, K] of vectors that are not tokens, with the weights for
        tokens.

        Args:
          z: the vectors.
          learns: False treats the weights as constants.
        """
        weights = self.norm, self.keys, self.values
        norm, of_keys, of_values = weights if learns else jax.lax.stop_gradient(weights)
        h = dropout(self, rms_norm(z, norm), self.model.dropout)
        keys, values = dense(h, of_keys), dense(h, of_values)
        return StateKV(l2_normalize(keys) if self.model.normalize_qk else keys, values)

    def query_scale(self, name: str = "scale") -> Float[Array, " H"]:
        """Returns the scale per head that is folded into the queries: learned, or 1/sqrt(K) for
        unnormalised queries.
        """
        m = self.model
        if m.normalize_qk:
            return jnp.abs(getattr(self, name))
        return jnp.full((m.heads,), m.head_dim**-0.5)

    def bias(self, reach: int | None = None) -> Float[Array, "H W"] | None:
        """Of `reach` keys (None: the window's), nearest to a query first; or none."""
        m, reach = self.model, reach or self.model.window
        if m.positions == "t5":
            bias = relative_bias(
                self.relative_bias, window=reach, attend_to_self=m.attend_to_self,
                max_distance=m.relative_max_distance,
            )  # fmt: skip
        elif m.positions == "alibi":
            bias = alibi_bias(
                self.alibi_scale, self.alibi_bound, heads=m.heads, window=reach,
                attend_to_self=m.attend_to_self,
            )  # fmt: skip
        else:
            return None
        if m.bias_before_scale and m.normalize_qk:
            bias = bias * jnp.abs(self.scale)[:, None]
        return bias

    def far_bias(self) -> Float[Array, " H"]:
        """Returns the position bias of keys beyond the window, which is that of
        its farthest key.
        """
        bias = self.bias()
        return jnp.zeros((self.model.heads,)) if bias is None else bias[:, -1]

    def attend(
        self,
        x: Float[Array, "B T D"],
        projections: TokenProjections,
        past: KVCache,
        memory: StateKV | None,
        mix: Mix | None = None,
        taps: TokenTaps = NO_TAPS,
    ) -> Float[Array, "B T D"]:
        """Returns the layer's output for a segment.

        Args:
          memory: keys and values [B, N, S, H, K] of the recurrent states, or None.
        """
        m = self.model
        tokens, mask, raw = x.shape[1], None, projections.raw
        given = raw or projections
        queries, keys, crossing = given.queries, given.keys, given.cross_queries
        values, cached = projections.values, past.keys
        if m.positions == "rotary":  # here, so that caches and states keep keys as they are
            table = rotations(-m.window, m.window + tokens, m.head_dim)
            own = Rotation(*(part[m.window :] for part in table))
            cached = rotate(cached, Rotation(*(part[: m.window] for part in table)))
            queries, keys = rotate(queries, own), rotate(keys, own)
        if m.dropout and self.training:
            # Shared by lanes and blocks as in the original: one tile to draw and to read.
            drawn = Dropout(self.make_rng(SHARED), m.dropout)
            mask = drawn.shared_mask(m.heads, m.window, m.window)
        part = segment_part(
            queries, (cached, past.values), keys, values, self.bias(), past.cache_mask, mask,
            attend_to_self=m.attend_to_self, null_keys=has_null_keys(m),
            scale=self.query_scale() if raw else None,
            implementation=self.kernels.window_attention,
        )  # fmt: skip
        attended = [part.output if mix is None else mix(projections.queries, part)]
        if memory is not None:
            attended.append(
                attend(
                    crossing, *memory, scale=self.query_scale("cross_scale") if raw else None,
                    implementation=self.kernels.softmax_attention,
                )
            )  # fmt: skip
        return self.finish(x, attended, taps)

    def attend_step(
        self,
        x: Float[Array, "B 1 D"],
        window: WindowState,
        block: OpenBlock,
        position: Int[Array, ""],
        memory: StateKV | None,
        mix: Mix | None = None,
        projections: TokenProjections | None = None,
    ) -> tuple[Float[Array, "B 1 D"], OpenBlock]:
        """Returns the layer's output for one token at `position` of its block, and the block with
        the token's keys and values.

        Args:
          memory: keys and values [B, S, H, K] of the recurrent states, or None.
          projections: the projections of the token, if they are not made from x.
        """
        m = self.model
        projections = projections or self.project(x)

        def written(ring: Float[Array, "B W H K"], z: Float[Array, "B 1 H K"]) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(ring, z, position, axis=1)

        after = block._replace(
            keys=written(block.keys, projections.keys),
            values=written(block.values, projections.values),
        )
        ring = after if m.attend_to_self else block
        queries, keys = projections.queries, ring.keys
        if m.positions == "rotary":
            queries, keys = self._rotate_step(queries, keys, position)
        part = window_part_step(
            queries[:, 0], keys, ring.values, self.bias(), cache_is_readable(m, window),
            position, attend_to_self=m.attend_to_self, null_keys=has_null_keys(m),
        )  # fmt: skip
        part = AttentionPart(part.output[:, None], part.lse[:, None])
        attended = [part.output if mix is None else mix(projections.queries, part)]
        if memory is not None:
            attended.append(attend(projections.cross_queries, *memory))
        return self.finish(x, attended), after

    def _rotate_step(
        self,
        queries: Float[Array, "B 1 H K"],
        keys: Float[Array, "B W H K"],
        position: Int[Array, ""],
    ) -> tuple[Float[Array, "B 1 H K"], Float[Array, "B W H K"]]:
        """Applies rotary positions to a token and to its ring of keys, of which those that were not
        overwritten yet are W tokens back.
        """
        m = self.model
        table = rotations(-m.window, 2 * m.window, m.head_dim)
        slots = jnp.arange(m.window)
        own = slots <= position - (0 if m.attend_to_self else 1)

        def rows(places: Int[Array, " P"]) -> Rotation:
            return Rotation(*(jnp.take(jnp.asarray(part), places, axis=0) for part in table))

        of_queries, of_keys = rows(position[None] + m.window), rows(slots + m.window * own)
        return rotate(queries, of_queries), rotate(keys, of_keys)

    def _along(self, x: Float[Array, "B T D"]) -> str | None:
        """Returns the name of the axis of tokens, which is sharded by whole blocks
        or not at all.
        """
        return "tokens" if shard_count("blocks", x.shape[1] // self.model.window) > 1 else None

    def finish(
        self, x: Float[Array, "B T D"], attended: Sequence[Float[Array, "B T H K"]],
        taps: TokenTaps = NO_TAPS,
    ) -> Float[Array, "B T D"]:  # fmt: skip
        """Adds the outputs of the attentions to x, then the output of the MLP."""
        tokens = self._along(x)
        attended = [constrain(part, "lanes", tokens, "heads", None) for part in attended]
        x = x + deferred.joined(attended, self.output, taps.output, inputs=3)
        x = constrain(x, "lanes", tokens, None)
        y = x + dropout(self, self._mlp(rms_norm(x, self.mlp_norm), taps), self.model.dropout)
        return constrain(y, "lanes", tokens, None)

    def _mlp(self, h: Float[Array, "B T D"], taps: TokenTaps) -> Float[Array, "B T D"]:
        biased, first, last = self.model.mlp_bias, taps.mlp_in, taps.mlp_out
        if first and last and not biased:
            return deferred.relu_mlp(h, (self.mlp_in, self.mlp_out), (first, last))
        hidden = deferred.dot(h, self.mlp_in, first)
        if biased:
            hidden = add_shared(hidden, self.mlp_in_bias)
        hidden = relu(hidden, keeps=last is not None)
        hidden = constrain(hidden, "lanes", self._along(h), "mlp")
        out = deferred.dot(hidden, self.mlp_out, last)
        return add_shared(out, self.mlp_out_bias) if biased else out


def with_cache(
    model: Model,
    state: WindowState,
    projections: TokenProjections,
    document_start: Bool[Array, "B N"],
    *,
    as_they_are: bool = False,
) -> tuple[KVCache, WindowState]:
    """Returns the cache that a segment attends to, and the next state.

    Args:
      as_they_are: True caches raw keys, which attention normalises itself.
    """
    document_start = constrain(document_start, "lanes", None)
    rows = state.valid & ~document_start[:, 0]
    state = state._replace(valid=rows)
    if not model.mask_empty_cache:
        state = zero_where_invalid(state)
    cache_mask = jnp.concatenate([rows[:, None], ~document_start[:, 1:]], axis=1) & model.cache
    cache_mask = constrain(cache_mask, "lanes", None)
    raw = projections.raw  # else all keys would be normalised for the sake of the last
    shown = raw.handed if raw else (projections.keys, projections.values)
    keys, values = (last_block(x, model.window) for x in shown)
    if raw and not as_they_are:
        keys = l2_normalize(keys)
    after = WindowState(keys, values, jnp.ones_like(state.valid))
    return KVCache(state.keys, state.values, cache_mask), after
