"""The decoder of all language models. Transformer-XL, sliding-window and block-recurrent models
differ only in the kinds of their layers.

A segment is the tokens that each row of the batch reads in one call. A segment consists of blocks.
Documents start at block boundaries, and recurrent states are updated once per block. The letters of
shapes are those of `brt.layers.state`; V is the size of the vocabulary.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.distributed.rules import constrain
from brt.layers.basic import compute_dtype, dropout, norm_parameters, normed, parameter
from brt.layers.runs import (
    ModelState,
    StackBlock,
    StackState,
    new_stack_state,
    replace_parts,
    runs,
)
from brt.layers.stack import Stack
from brt.ops.lookup import lookup
from brt.ops.products import transposed_product
from brt.ops.softmax import soft_capped
from brt.types import Tokens


class DecoderOutput(NamedTuple):
    """The result of reading a segment."""

    # The outputs of the last norm in the compute dtype, from which `logits` computes the logits of
    # the next tokens.
    hidden: Float[Array, "B T D"]
    state: StackState
    # The next model state (statistics that layers learn without gradients), which only training
    # uses.
    model_state: ModelState
    # Maps names to auxiliary losses of layers, float32. Each is a mean over tokens. The loss of a
    # train step is a sum over tokens, so it multiplies these means by the number of tokens.
    losses: Mapping[str, Float[Array, ""]]
    # Float32 scalars to log, averaged over neighbouring layers of one kind (a run of layers). A
    # name such as "routing_3/largest_cluster" consists of the name of the run (the kind and the
    # index of the first layer) and the name of the metric.
    metrics: Mapping[str, Float[Array, ""]]


class Decoder(nn.Module):
    """A language model that reads tokens in segments (`__call__`) or one by one (`begin_block`,
    `decode_step` for each token of a block, `end_block`).

    Both ways compute the same. A `StackState` has the states of all runs (neighbouring layers of
    one kind, `brt.layers.runs`), and a `StackBlock` their open blocks (blocks that are being
    filled). Where methods take a model state, None is allowed if no layer has statistics that it
    learns without gradients. Training enables dropout, which needs the rngs of
    `brt.layers.basic.dropout_rngs`.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        m = self.model
        self.embedding = parameter(
            self, "embedding", (m.vocab_size, m.model_dim), ("vocab", "embed"),
            nn.initializers.normal(1.0),
        )  # fmt: skip
        if m.positions == "learned":
            self.positions = parameter(
                self, "positions", (m.rotary.context, m.model_dim), ("buckets", "embed"),
                nn.initializers.normal(0.02),
            )  # fmt: skip
        self.stack = Stack(m, self.training, self.kernels)
        self.norm = norm_parameters(self, m, "norm")
        if not m.embedding.tied:
            self.output = parameter(
                self, "output", (m.vocab_size, m.model_dim), ("vocab", "embed"),
                nn.initializers.normal(1.0),
            )  # fmt: skip

    def embed(
        self, tokens: Int[Array, "B T"], position: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T D"]:
        """Returns the embeddings of tokens. `position` is the place of each row's first token in
        its block; None stands for the start of the block.
        """
        x = lookup(self.embedding, tokens, compute_dtype(self.model), "vocab")
        factor = self.model.embedding.factor
        x = x if factor == 1 else x * jnp.asarray(factor, x.dtype)
        if self.model.positions == "learned":
            places = jnp.arange(tokens.shape[1])[None]
            places = places if position is None else position[:, None] + places
            places %= self.model.block_length
            x += jnp.take(self.positions, places, axis=0).astype(x.dtype)
        return x

    def _hidden(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        hidden = dropout(self, normed(self.model, x, self.norm), self.model.dropout)
        return constrain(hidden, "lanes", "tokens", None)

    def __call__(
        self,
        tokens: Tokens,
        state: StackState,
        document_start: Bool[Array, "B N"],
        model_state: ModelState | None = None,
    ) -> DecoderOutput:
        """Reads a segment; `document_start` is True where a block is the first of a document."""
        x, state, aux = self.stack(self.embed(tokens), state, document_start, model_state or {})
        return DecoderOutput(self._hidden(x), state, *aux)

    def begin_block(self, state: StackState, model_state: ModelState | None = None) -> StackBlock:
        """Returns open blocks without tokens, which `decode_step` fills token by token."""
        return self.stack.begin_block(state, model_state or {})

    def prepare_block(
        self, block: StackBlock, position: Int[Array, " B"], model_state: ModelState | None = None
    ) -> StackBlock:
        """Returns open blocks with additional data that make calls of `decode_step` faster.
        `position` is the number of tokens that each open block has so far.
        `brt.layers.state.without_ready` removes the additional data.
        """
        return self.stack.prepare_block(block, position, model_state or {})

    def decode_step(
        self,
        tokens: Int[Array, " B"] | Int[Array, "B T"],
        state: StackState,
        block: StackBlock,
        position: Int[Array, " B"],
        model_state: ModelState | None = None,
    ) -> tuple[Float[Array, "B V"], StackBlock]:
        """Reads one token, or T tokens of one block, in every row of the batch. `position` is the
        place of the first of these tokens in its block.

        T must divide `position` and the number of tokens of a block and of every window. Returns
        the float32 logits of the token after the T tokens, and the open blocks with these tokens
        added.
        """
        x = self.embed(tokens.reshape(len(tokens), -1), position)
        x, block = self.stack.decode_step(x, state, block, position, model_state or {})
        return self.next_logits(x), block

    def next_logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B V"]:
        """Returns the float32 logits of the token after T tokens, given the outputs x of the last
        layer for these tokens.
        """
        weights = self.embedding if self.model.embedding.tied else self.output
        return logits(self.model, weights, self._hidden(x[:, -1:]))[:, 0]

    def end_block(
        self, state: StackState, block: StackBlock, model_state: ModelState | None = None
    ) -> StackState:
        """Returns the states after a full block. `__call__` returns the same states if it reads the
        tokens of this block.
        """
        return self.stack.end_block(state, block, model_state or {})


def new_state(model: Model, batch: int) -> StackState:
    return new_stack_state(model, batch, compute_dtype(model))


def forget(model: Model, state: StackState, parts: Collection[str]) -> StackState:
    """Returns the state after `parts` of it are reset, as if nothing had been read. The names of
    the parts are "cache", "state" and "memory".
    """
    lanes = len(jax.tree.leaves(state)[0])
    return replace_parts(model, state, new_state(model, lanes), parts)


def output_weights(model: Model, params: Mapping[str, Any]) -> Float[Array, "V D"]:
    return params["embedding" if model.embedding.tied else "output"]


def logit_scale(model: Model) -> float:
    """Returns the factor by which products of hidden vectors and output weights are multiplied."""
    e = model.embedding
    sizes = {"one": 1, "model_dim": model.model_dim, "vocab": model.vocab_size}
    return sizes[e.logit_scale] ** -0.5 / e.logit_divisor


def logits(
    model: Model, weights: Float[Array, "V D"], hidden: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """Returns the float32 logits. `hidden` is `DecoderOutput.hidden`, and `weights` is the matrix
    that `output_weights` returns.
    """
    products = transposed_product(hidden, weights.astype(hidden.dtype)) * logit_scale(model)
    return soft_capped(products, model.embedding.soft_cap)


def forward_flops_per_token(model: Model) -> int:
    """Returns the FLOPs per token of a forward pass; a train step takes about three times as many.

    Only matrix products are counted, 2 m n k for the product of an m x k and a k x n matrix. The
    step times in Table 1 of Block-Recurrent Transformers therefore do not follow from these FLOPs:
    the authors' code also computed products whose results it did not use.
    """
    layers = sum(run.layers * run.layer_kind.flops(run.model) for run in runs(model))
    return layers + 2 * model.model_dim * model.vocab_size
