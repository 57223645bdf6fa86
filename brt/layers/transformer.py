"""Layers that encoders and encoder-decoders share.

The settings in `Block` distinguish the model families RoBERTa, T5 and BART. In shapes, *B stands
for any leading axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt import config
from brt.config import Attention
from brt.distributed.rules import constrain
from brt.layers import attention_kinds
from brt.layers.basic import ONES, ZEROS, compute_dtype, dropout, parameter, unrolled
from brt.ops import masked_attention
from brt.ops.dense import dense, relu
from brt.ops.dropout import Dropout
from brt.ops.encoder_attention import GlobalBlocks, GlobalKeys, block_sums, local_attention
from brt.ops.lookup import lookup
from brt.ops.normalization import layer_norm, rms_norm
from brt.ops.reductions import add_shared

# In BART's and RoBERTa's tables of positions, the first two rows belong to no position of a token.
POSITION_OFFSET = 2
# This is the standard deviation of initial embeddings and positions.
DEVIATION = 0.02


class Linear(nn.Module):
    """A linear layer with the parameters `kernel` [*inputs, *outputs] and `bias` [*outputs]. The
    initial kernel has the standard deviation `deviation`; None stands for fan_in ** -0.5.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str | None, ...]
    has_bias: bool = True
    deviation: float | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        width = math.prod(self.inputs)
        init = nn.initializers.normal(self.deviation or width**-0.5)
        kernel = parameter(self, "kernel", (*self.inputs, *self.outputs), self.axes, init)
        y = dense(x, kernel, len(self.inputs))
        if not self.has_bias:
            return y
        axes = self.axes[len(self.inputs) :]
        return add_shared(y, parameter(self, "bias", self.outputs, axes, ZEROS))


class Norm(nn.Module):
    """A root-mean-square norm with the parameter `scale`, or a layer norm with `scale` and `bias`.
    `epsilon` is added to the mean square or to the variance.
    """

    kind: Literal["rms", "layer"]
    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        size = x.shape[-1:]
        scale = parameter(self, "scale", size, ("embed",), ONES)
        if self.kind == "rms":
            return rms_norm(x, scale, self.epsilon)
        return layer_norm(x, scale, parameter(self, "bias", size, ("embed",), ZEROS), self.epsilon)


class Embedding(nn.Module):
    """A table with a vector for each token, token type or distance bucket.

    The module returns vectors in `dtype`.
    """

    shape: tuple[int, int]
    axes: tuple[str, str]
    deviation: float
    dtype: jnp.dtype = jnp.dtype("float32")

    def setup(self) -> None:
        init = nn.initializers.normal(self.deviation)
        self.embedding = parameter(self, "embedding", self.shape, self.axes, init)

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        # Columns with the axis "embed" may be sharded over devices. `lookup` can read such tables.
        if self.axes[1] != "embed":
            return jnp.take(self.embedding, ids, axis=0).astype(self.dtype)
        return lookup(self.embedding, ids, self.dtype, self.axes[0])


class Block(NamedTuple):
    """Sizes and settings of a layer."""

    model_dim: int
    heads: int
    head_dim: int
    mlp_dim: int
    activation: Literal["relu", "gelu", "gated_gelu"]  # gated_gelu has a second projection.
    norm: Literal["rms", "layer"]
    norm_epsilon: float
    # True normalises the input of each sub-layer. False normalises the sum of input and output.
    norm_first: bool
    bias: bool  # True if matrix products have a bias.
    # The standard deviation of initial matrices; None for fan_in ** -0.5.
    deviation: float | None
    scale: float  # The factor of the products of queries and keys.
    dropout: float  # The dropout rate of embeddings and of the outputs of sub-layers.
    attention_dropout: float
    activation_dropout: float  # The dropout rate of the MLP's hidden features.
    dtype: jnp.dtype  # The dtype of activations and caches.
    kernels: config.Kernels

    def linear(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str | None, ...],
        deviation: float | None = None,
    ) -> Linear:
        """Returns a module that maps axes of the sizes `inputs` to axes of the sizes `outputs`. If
        `Block.deviation` is None, the initial kernel has the standard deviation `deviation`.
        """
        return Linear(inputs, outputs, axes, self.bias, self.deviation or deviation)

    def new_norm(self) -> Norm:
        return Norm(self.norm, self.norm_epsilon)


def of_encoder(m: config.Encoder, kernels: config.Kernels) -> Block:
    """Returns the settings of an encoder's layers. In RoBERTa, `m.norm_first` is False."""
    return Block(
        m.model_dim, m.heads, m.head_dim, m.mlp_dim, m.activation, "layer", m.norm_epsilon,
        m.norm_first, bias=True, deviation=None, scale=m.head_dim**-0.5, dropout=m.dropout,
        attention_dropout=_own(m.attention_dropout, m.dropout), activation_dropout=0.0,
        dtype=compute_dtype(m), kernels=kernels,
    )  # fmt: skip


def of_seq2seq(m: config.Seq2Seq, kernels: config.Kernels) -> Block:
    """Returns the settings of T5's or BART's layers."""
    t5 = m.family == "t5"
    return Block(
        m.model_dim, m.heads, m.head_dim, m.mlp_dim, m.activation, "rms" if t5 else "layer",
        m.norm_epsilon, norm_first=t5, bias=not t5, deviation=None if t5 else DEVIATION,
        scale=1.0 if t5 else m.head_dim**-0.5, dropout=m.dropout,
        attention_dropout=_own(m.attention_dropout, m.dropout),
        activation_dropout=_own(m.activation_dropout, m.dropout), dtype=compute_dtype(m),
        kernels=kernels,
    )  # fmt: skip


def _own(rate: float, usual: float) -> float:
    return usual if rate == -1 else rate


class Residual(nn.Module):
    """Base class of layers whose sub-layers (attention and MLP) have residual connections.

    For a sub-layer f with a norm, a layer computes y = f(before(norm, x)) and then x = after(norm,
    x, y).
    """

    block: Block
    training: bool = False

    def before(self, norm: Norm, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return norm(x) if self.block.norm_first else x

    def after(
        self, norm: Norm, x: Float[Array, "*B D"], y: Float[Array, "*B D"]
    ) -> Float[Array, "*B D"]:
        total = x + dropout(self, y, self.block.dropout)
        total = constrain(total, "lanes", *["tokens"] * (x.ndim - 2), None)
        return total if self.block.norm_first else norm(total)

    def around(
        self, norm: Norm, x: Float[Array, "*B D"], sublayer: Callable[[Array], Array]
    ) -> Float[Array, "*B D"]:
        return self.after(norm, x, sublayer(self.before(norm, x)))


class Mlp(nn.Module):
    """An MLP with one hidden layer: the projection `wi`, an activation, and the projection `wo`. A
    gated MLP has two projections `wi_0` and `wi_1`, and multiplies the activation of the first by
    the second.
    """

    block: Block
    training: bool = False

    def setup(self) -> None:
        b = self.block
        inner, outer, axes = (b.mlp_dim,), (b.model_dim,), ("embed", "mlp")
        if b.activation == "gated_gelu":
            self.wi_0, self.wi_1 = b.linear(outer, inner, axes), b.linear(outer, inner, axes)
        else:
            self.wi = b.linear(outer, inner, axes)
        self.wo = b.linear(inner, outer, ("mlp", "embed"))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        b = self.block
        if b.activation == "gated_gelu":
            hidden = jax.nn.gelu(self.wi_0(x), approximate=True) * self.wi_1(x)
        else:
            hidden = activated(b.activation, self.wi(x))
        return self.wo(dropout(self, hidden, b.activation_dropout))


def activated(kind: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    return relu(x) if kind == "relu" else jax.nn.gelu(x, approximate=False)


class Projections(nn.Module):
    """Base class of attention modules: the projections to queries, keys (unless the queries are
    also the keys) and values, and from the heads to the output.
    """

    block: Block
    training: bool = False
    shared_queries_keys: bool = False

    def setup(self) -> None:
        b = self.block
        width, heads, axes = (b.model_dim,), (b.heads, b.head_dim), ("embed", "heads", "head_dim")
        # If the logits are not divided by the square root of the head size, as in T5, the initial
        # kernel of the queries is divided by this root instead.
        query_deviation = (b.model_dim * b.head_dim * b.scale**2) ** -0.5
        self.q = b.linear(width, heads, axes, query_deviation)
        if not self.shared_queries_keys:
            self.k = b.linear(width, heads, axes)
        self.v = b.linear(width, heads, axes)
        self.o = b.linear(heads, width, ("heads", "head_dim", "embed"))

    def queries(self, x: Float[Array, "*B D"]) -> Float[Array, "*B H K"]:
        return self.q(x) * self.block.scale

    def attend(self, *inputs: Array | Dropout | None) -> Float[Array, "*B H K"]:
        """Attends with the arguments of `brt.ops.masked_attention.attend`."""
        name = self.block.kernels.masked_attention
        return masked_attention.attend(*inputs, implementation=name)

    def drop(self) -> Dropout | None:
        rate = self.block.attention_dropout
        return Dropout(self.make_rng("dropout"), rate) if self.training and rate else None


class SharedInputs(NamedTuple):
    """Inputs that all layers of an encoder share. Biases are float32 and are added to the logits.

    Attributes:
      bias: the bias of Q queries and S keys. For full attention, Q = S = T. For local attention,
        the Q = W tokens of a block attend to the S = 3 W tokens of the block and its two
        neighbours.
      distance_bias: the bias of each of O = 2 T - 1 distances (position of the key minus position
        of the query) from 1 - T to T - 1, for kinds of attention that need the bias in this form.
      blocks: the division of the tokens into G blocks. Each block has a transient global token,
        which is the sum of the block's tokens (LongT5).
      global_bias: the bias between tokens and the G global tokens.
    """

    valid: Bool[Array, "B T"]
    bias: Float[Array, "H Q S"] | None = None
    distance_bias: Float[Array, "H O"] | None = None
    blocks: GlobalBlocks | None = None
    global_bias: Float[Array, "B H T G"] | None = None


class SelfAttention(Projections):
    """Self-attention of an encoder.

    If `radius` is 0, a token attends to all valid tokens. Otherwise it attends to itself, to
    `radius` neighbours on each side and, with `has_globals`, to the sums of blocks (LongT5).

    All kinds of attention have the same parameters, so weights can be used with any kind.
    """

    attention: Attention = Attention()
    radius: int = 0
    has_globals: bool = False

    def setup(self) -> None:
        super().setup()
        if self.has_globals:
            self.global_norm = self.block.new_norm()

    def __call__(
        self, x: Float[Array, "B T D"], key: jax.Array, inputs: SharedInputs
    ) -> Float[Array, "B T D"]:
        """Returns the attention output; `key` is a random key for kinds that draw numbers."""
        queries, scale, drop = self.q(x), self.block.scale, self.drop()
        kernels = self.block.kernels
        keys, values = queries if self.shared_queries_keys else self.k(x), self.v(x)
        if self.radius:
            global_keys = None
            if self.has_globals:
                global_keys = self._global_keys(x, inputs.blocks, inputs.global_bias)
            y = local_attention(
                queries * scale, keys, values, inputs.bias, inputs.valid, global_keys, drop,
                radius=self.radius, implementation=kernels.encoder_attention,
            )  # fmt: skip
        elif inputs.bias is not None:
            seen = inputs.valid[:, None]
            y = self.attend(queries * scale, keys, values, inputs.bias, seen, drop)
        else:
            y = attention_kinds.attend(
                queries, keys, values, inputs.valid, self.attention, key, drop,
                scale=scale, bias=inputs.distance_bias, kernels=kernels,
            )  # fmt: skip
        return self.o(y)

    def _global_keys(
        self, x: Float[Array, "B T D"], blocks: GlobalBlocks, bias: Float[Array, "B H T G"]
    ) -> GlobalKeys:
        sums = self.global_norm(block_sums(x, blocks))
        return GlobalKeys(self.k(sums), self.v(sums), bias, blocks.exist)


class EncoderLayer(Residual):
    """`SelfAttention` and an MLP, each with a residual connection and a norm before or after it."""

    attention: Attention = Attention()
    radius: int = 0
    has_globals: bool = False
    shared_queries_keys: bool = False

    def setup(self) -> None:
        self.self_attn = SelfAttention(
            self.block, self.training, self.shared_queries_keys, self.attention, self.radius,
            self.has_globals,
        )  # fmt: skip
        self.self_attn_norm = self.block.new_norm()
        self.mlp = Mlp(self.block, self.training)
        self.mlp_norm = self.block.new_norm()

    def __call__(
        self, x: Float[Array, "B T D"], key: jax.Array, inputs: SharedInputs
    ) -> tuple[Float[Array, "B T D"], None]:
        """Returns the output and None, because the function `stacked` expects a pair."""
        x = self.around(self.self_attn_norm, x, lambda h: self.self_attn(h, key, inputs))
        return self.around(self.mlp_norm, x, self.mlp), None


def stacked(
    layer: type[nn.Module],
    count: int,
    *,
    remat: bool,
    methods: Sequence[str] = ("__call__",),
) -> type[nn.Module]:
    """Returns a module class that calls `count` layers one after the other, by a scan over their
    stacked parameters. JAX traces the code of a layer once, whatever the number of layers.

    The class has the fields of `layer`, and its parameters have the layers on axis 0. The methods
    of the class and of `layer` have the arguments (x, each, shared) and return (x, outputs):

      x: arrays that each layer gets from the layer before and changes. The methods of the class
        return the arrays x of the last layer.
      each, outputs: further arguments and results, which differ between layers. The methods of the
        class take and return these arrays with the layers on axis 0, and the methods of `layer`
        without this axis.
      shared: arrays that all layers read.

    `remat` = True recomputes the activations of `__call__` in the backward pass. The scan is a loop
    on CPUs, and on accelerators if `remat` is True. Without `remat`, it is unrolled on
    accelerators, because a loop would copy the stored activations of all layers into stacked
    arrays.
    """
    if remat:
        layer = nn.remat(layer, methods=["__call__"], prevent_cse=False)
    return nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=(0, nn.broadcast),
        length=count,
        unroll=unrolled(0, count, 1 if remat else count),
        metadata_params={nn.PARTITION_NAME: "layers"},
        methods=list(methods),
        # Flax's check of constant variables is turned off, because it traces every layer twice.
        check_constancy_invariants=False,
    )


def layer_keys(key: jax.Array, count: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count))
