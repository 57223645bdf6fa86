"""The token side of a layer: attention of tokens to their window and to recurrent states, and the
MLP.
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
    ONES,
    SHARED,
    dropout,
    kernel_init,
    parameter,
)
from brt.layers.cache import KVCache, TokenProjections
from brt.layers.mlp import MLP
from brt.layers.state import LocalState, OpenBlock, WindowState, cache_is_readable, has_null_keys
from brt.layers.taps import NO_TAPS, TokenTaps
from brt.ops import deferred
from brt.ops.dense import dense
from brt.ops.dropout import Dropout
from brt.ops.local_attention import local_attention, local_attention_step
from brt.ops.normalization import l2_normalize, rms_norm, scaled_unit
from brt.ops.partial_attention import AttentionPart
from brt.ops.positions import Rotation, alibi_bias, relative_bias, rotate, rotations
from brt.ops.recurrent_attention import StateKV
from brt.ops.softmax_attention import attend
from brt.ops.window_attention import segment_part, window_part_step

# (queries [B, T, H, K], what they read in the window) -> that mixed with something else
Mix = Callable[[Array, AttentionPart], Array]


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
        self.mlp = MLP(m, self.training)
        nn.share_scope(self, self.mlp)  # The names of its parameters do not contain its own.

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the normalised input from which queries, keys and values are made."""
        return dropout(self, rms_norm(x, self.norm), self.model.dropout)

    def project(self, x: Float[Array, "B T D"], taps: TokenTaps = NO_TAPS) -> TokenProjections:
        """Returns queries, keys and values of the tokens, each by a matrix product of its own;
        splitting one product would copy its parts.
        """
        h, kernels = self.normed(x), [self.queries, self.keys]
        if self.cross_attends:
            kernels.append(self.cross_queries)
        kernels.append(self.values)
        names = ("lanes", self._along(h), "heads", None)
        queries, keys, *cross, values = (
            constrain(product, *names) for product in deferred.dots(h, kernels, taps.projections)
        )
        return TokenProjections(queries, keys, values, cross[0] if cross else None)

    def project_kv(self, z: Float[Array, "B S D"], *, learns: bool = True) -> StateKV:
        """Returns keys (as attention uses them) and values [B, S, H, K] of vectors that are not
        tokens, with the weights for tokens.

        Args:
          z: the vectors.
          learns: False treats the weights as constants.
        """
        weights = self.norm, self.keys, self.values
        norm, of_keys, of_values = weights if learns else jax.lax.stop_gradient(weights)
        h = dropout(self, rms_norm(z, norm), self.model.dropout)
        return StateKV(self.unit_keys(dense(h, of_keys)), dense(h, of_values))

    def unit_keys(self, keys: Float[Array, "*B H K"]) -> Float[Array, "*B H K"]:
        """Returns the keys as attention uses them: normalised if `Model.normalize_qk` is set."""
        return l2_normalize(keys) if self.model.normalize_qk else keys

    def scaled_queries(
        self, queries: Float[Array, "B T H K"], name: str = "scale"
    ) -> Float[Array, "B T H K"]:
        """Returns the queries as attention uses them: normalised and scaled (see `query_scale`)."""
        return (scaled_unit if self.model.normalize_qk else _scaled)(
            queries, self.query_scale(name)
        )

    def query_scale(self, name: str = "scale") -> Float[Array, " H"]:
        """Returns the scale per head that is folded into the queries: learned, or 1/sqrt(K) for
        unnormalised queries.
        """
        m = self.model
        if m.normalize_qk:
            return jnp.abs(getattr(self, name))
        return jnp.full((m.heads,), m.head_dim**-0.5)

    def bias(self, reach: int | None = None) -> Float[Array, "H W"] | None:
        """Returns the position bias of the `reach` nearest keys, the nearest first.

        Returns None if the model has no bias. `reach` = None stands for the window.
        """
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
        queries, keys, cached = projections.queries, projections.keys, past.keys
        if not m.normalize_qk:
            queries = self.scaled_queries(queries)
        if m.positions == "rotary":
            table = rotations(-m.window, m.window + x.shape[1], m.head_dim)
            own = Rotation(*(part[m.window :] for part in table))
            cached = rotate(cached, Rotation(*(part[: m.window] for part in table)))
            queries, keys = rotate(queries, own), rotate(keys, own)
        drawn = Dropout(self.make_rng(SHARED), m.dropout) if m.dropout and self.training else None
        tokens = queries, (cached, past.values), keys, projections.values, self.bias()
        scale = self.query_scale() if m.normalize_qk else None
        if past.first is not None:
            part = local_attention(
                *tokens, past.first, drawn, attend_to_self=m.attend_to_self, scale=scale
            )
        else:
            # Shared by lanes and blocks as in the original: one tile to draw and to read.
            mask = drawn and drawn.shared_mask(m.heads, m.window, m.window)
            part = segment_part(
                *tokens, past.cache_mask, mask, attend_to_self=m.attend_to_self,
                null_keys=has_null_keys(m), scale=scale,
                implementation=self.kernels.window_attention,
            )  # fmt: skip
        attended = [
            part.output if mix is None else mix(self.scaled_queries(projections.queries), part)
        ]
        if memory is not None:
            attended.append(self._attend_to_states(projections.cross_queries, memory))
        return self.finish(x, attended, taps)

    def _attend_to_states(
        self, queries: Float[Array, "B T H K"] | None, memory: StateKV
    ) -> Float[Array, "B T H K"]:
        assert queries is not None  # The block has cross queries.
        scale = self.query_scale("cross_scale") if self.model.normalize_qk else None
        if scale is None:
            queries = self.scaled_queries(queries, "cross_scale")
        return attend(queries, *memory, scale=scale, implementation=self.kernels.softmax_attention)

    def attend_step(
        self,
        x: Float[Array, "B 1 D"],
        window: WindowState | LocalState,
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

        slot = position % m.window

        def with_token(ring: Float[Array, "B W H K"], z: Float[Array, "B 1 H K"]) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(ring, z, slot, axis=1)

        after = block._replace(
            keys=with_token(block.keys, projections.keys),
            values=with_token(block.values, projections.values),
        )
        ring = after if m.attend_to_self else block
        scaled = self.scaled_queries(projections.queries)
        queries, keys = scaled, ring.keys
        if m.positions == "rotary":
            queries, keys = self._rotate_step(queries, keys, position)
        tokens = queries[:, 0], keys, ring.values, self.bias()
        options = {"attend_to_self": m.attend_to_self, "normalize_keys": m.normalize_qk}
        if isinstance(window, LocalState):
            read = window.length * m.cache + position
            part = local_attention_step(*tokens, read, position, **options)
        else:
            part = window_part_step(
                *tokens, cache_is_readable(m, window), position, null_keys=has_null_keys(m),
                **options,
            )  # fmt: skip
        part = AttentionPart(part.output[:, None], part.lse[:, None])
        attended = [part.output if mix is None else mix(scaled, part)]
        if memory is not None:
            attended.append(self._attend_to_states(projections.cross_queries, memory))
        return self.finish(x, attended), after

    def _rotate_step(
        self,
        queries: Float[Array, "B 1 H K"],
        keys: Float[Array, "B W H K"],
        position: Int[Array, ""],
    ) -> tuple[Float[Array, "B 1 H K"], Float[Array, "B W H K"]]:
        """Applies rotary positions to a token, at position 0, and to the keys of its ring, at their
        distances before it.
        """
        m = self.model
        nearest = 0 if m.attend_to_self else 1
        steps = (position - nearest - jnp.arange(m.window)) % m.window + nearest
        table = rotations(-m.window, m.window + 1, m.head_dim)

        def angles_at(places: Int[Array, " P"]) -> Rotation:
            return Rotation(*(jnp.take(jnp.asarray(part), places, axis=0) for part in table))

        zero = jnp.asarray([m.window])
        return rotate(queries, angles_at(zero)), rotate(keys, angles_at(zero - steps))

    def _along(self, x: Float[Array, "B T D"]) -> str | None:
        """Returns the name of the axis of tokens, which is sharded by whole blocks
        or not at all.
        """
        return (
            "tokens" if shard_count("blocks", x.shape[1] // self.model.block_length) > 1 else None
        )

    def finish(
        self, x: Float[Array, "B T D"], attended: Sequence[Float[Array, "B T H K"]],
        taps: TokenTaps = NO_TAPS,
    ) -> Float[Array, "B T D"]:  # fmt: skip
        """Returns x plus the projected outputs of the attentions, plus the output of the MLP."""
        tokens = self._along(x)
        attended = [constrain(part, "lanes", tokens, "heads", None) for part in attended]
        x = x + deferred.dot_of_parts(attended, self.output, taps.output, inputs=3)
        x = constrain(x, "lanes", tokens, None)
        return constrain(self.mlp(x, tokens, taps), "lanes", tokens, None)
