"""The decoder of all language models. Transformer-XL, sliding-window and block-recurrent models
differ only in the kinds of their layers.

A segment is the tokens that each row of the batch reads in one call. A segment consists of blocks.
Documents start at block boundaries, and recurrent states are updated once per block. In shapes, B
is the number of rows of the batch, T the number of tokens and N the number of blocks of a segment,
D the width of the model, and V the number of tokens in the vocabulary.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.distributed.rules import constrain
from brt.layers.basic import compute_dtype, dropout, norm_parameter, normed, parameter
from brt.layers.runs import ModelState, StackBlock, StackState, new_stack_state, replace_parts
from brt.layers.stack import Stack
from brt.ops.few_rows import transposed_product
from brt.ops.lookup import lookup
from brt.types import Tokens


class DecoderOutput(NamedTuple):
    """The result of reading a segment.

    Attributes:
      hidden: [B, T, D], the outputs of the last norm in the compute dtype, from which `logits`
        computes the logits of the next tokens.
      state: the states of all layers after the segment.
      model_state: the next model state (statistics that layers learn without gradients), which
        only training uses.
      losses: auxiliary losses of layers by name, float32 scalars. Each is a mean over tokens. A
        train step, whose loss is a sum over tokens, multiplies them by the number of tokens.
      metrics: float32 scalars to log, averaged over neighbouring layers of one kind (a run of
        layers). A name such as "routing_3/largest_cluster" consists of the name of the run (the
        kind and the index of the first layer) and the name of the metric.
    """

    hidden: Float[Array, "B T D"]
    state: StackState
    model_state: ModelState
    losses: Mapping[str, Float[Array, ""]]
    metrics: Mapping[str, Float[Array, ""]]


class Decoder(nn.Module):
    """A language model that reads tokens in segments (`__call__`) or one by one (`begin_block`,
    `decode_step` for each token of a block, `end_block`).

    Both ways compute the same. Where methods take a model state, None is allowed if no layer has
    statistics that it learns without gradients.

    Attributes:
      model: the settings of the model, with the size of the vocabulary set.
      training: True enables dropout, which needs the rngs of `brt.layers.basic.dropout_rngs`.
      kernels: the settings that select the implementations of operations.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        """Creates the embedding, the layers and the last norm; and a matrix for the logits, unless
        logits are computed with the embedding.
        """
        m = self.model
        self.embedding = parameter(
            self, "embedding", (m.vocab_size, m.model_dim), ("vocab", "embed"),
            nn.initializers.normal(1.0),
        )  # fmt: skip
        self.stack = Stack(m, self.training, self.kernels)
        self.norm = norm_parameter(self, m, "norm")
        if not m.embedding.tied:
            self.output = parameter(
                self, "output", (m.vocab_size, m.model_dim), ("vocab", "embed"),
                nn.initializers.normal(1.0),
            )  # fmt: skip

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns the vectors of tokens that the lowest layer reads."""
        x = lookup(self.embedding, tokens, compute_dtype(self.model), "vocab")
        if self.model.embedding.scaled:
            x *= jnp.asarray(self.model.model_dim**0.5, x.dtype)
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
        """Reads a segment.

        Args:
          tokens: the ids [B, T] of the tokens.
          state: the states of the layers before the segment (see `new_state`).
          document_start: True where a block is the first block of a document.
          model_state: statistics that layers learn without gradients; None if no layer has any.
        """
        x, state, aux = self.stack(self.embed(tokens), state, document_start, model_state or {})
        return DecoderOutput(self._hidden(x), state, *aux)

    def begin_block(self, state: StackState, model_state: ModelState | None = None) -> StackBlock:
        """Returns open blocks without tokens, which `decode_step` fills token by token.

        An open block holds what layers remember of a block whose tokens are not all read yet. There
        is one open block for each run of equal neighbouring layers.

        Args:
          state: the states of the layers after the previous block.
          model_state: statistics that layers learn without gradients; None if no layer has any.
        """
        return self.stack.begin_block(state, model_state or {})

    def prepare_block(
        self, block: StackBlock, position: Int[Array, ""], model_state: ModelState | None = None
    ) -> StackBlock:
        """Returns open blocks in which layers have prepared data for several calls of
        `decode_step`, for example rotated keys.

        `brt.layers.state.without_ready` removes these data.

        Args:
          block: the open blocks.
          position: the number of tokens of the block that have been read.
          model_state: statistics that layers learn without gradients; None if no layer has any.
        """
        return self.stack.prepare_block(block, position, model_state or {})

    def decode_step(
        self,
        tokens: Int[Array, " B"] | Int[Array, "B T"],
        state: StackState,
        block: StackBlock,
        position: Int[Array, ""],
        model_state: ModelState | None = None,
    ) -> tuple[Float[Array, "B V"], StackBlock]:
        """Reads one token of every row of the batch, or T tokens of a block.

        T must divide the number of tokens of a block and of every window, and the first of several
        tokens must have a position that T divides.

        Args:
          tokens: the ids of the tokens.
          state: the states of the layers after the previous block.
          block: the open blocks, which have the block's earlier tokens.
          position: the position of the first token in the block.
          model_state: statistics that layers learn without gradients; None if no layer has any.

        Returns:
          The float32 logits of the token after the last one, and the open blocks with the tokens
            added.
        """
        x = self.embed(tokens.reshape(len(tokens), -1))
        x, block = self.stack.decode_step(x, state, block, position, model_state or {})
        return self.next_logits(x), block

    def next_logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B V"]:
        """Returns the float32 logits of the token after the last of T tokens, from the vectors that
        the highest layer returned.
        """
        weights = self.embedding if self.model.embedding.tied else self.output
        return logits(self.model, weights, self._hidden(x[:, -1:]))[:, 0]

    def end_block(
        self, state: StackState, block: StackBlock, model_state: ModelState | None = None
    ) -> StackState:
        """Returns the states of the layers after a full block. They equal the states after
        `__call__` has read the block as a segment.

        Args:
          state: the states of the layers after the previous block.
          block: the open blocks, which have all tokens of the block.
          model_state: statistics that layers learn without gradients; None if no layer has any.
        """
        return self.stack.end_block(state, block, model_state or {})


def new_state(model: Model, batch: int) -> StackState:
    """Returns the states of all layers before the first token, in a model with the settings
    `model` and for a batch of `batch` rows.
    """
    return new_stack_state(model, batch, compute_dtype(model))


def forget(model: Model, state: StackState, parts: Collection[str]) -> StackState:
    """Returns the states of all layers, in which some parts are reset as if nothing had been read.

    An evaluation that calls this function before every segment measures how much a part of the
    state contributes to the predictions.

    Args:
      model: the settings of the model.
      state: the states of all layers.
      parts: the names of the parts to reset: "cache" (cached keys and values), "state" (recurrent
        states) and "memory" (other memories).
    """
    lanes = len(jax.tree.leaves(state)[0])
    return replace_parts(model, state, new_state(model, lanes), parts)


def output_weights(model: Model, params: Mapping[str, Any]) -> Float[Array, "V D"]:
    """Returns the matrix from which `logits` computes logits: the embedding, or a matrix of its own
    if `Embedding.tied` is False.

    Args:
      model: the settings of the model.
      params: the parameters of the decoder.
    """
    return params["embedding" if model.embedding.tied else "output"]


def logit_scale(model: Model) -> float:
    """Returns the factor by which the products of hidden vectors and output weights are multiplied
    to get logits: 1, 1 / sqrt(D) or 1 / sqrt(V), as the setting `Embedding.logit_scale` says.
    """
    if model.embedding.logit_scale == "one":
        return 1.0
    return (
        model.model_dim if model.embedding.logit_scale == "model_dim" else model.vocab_size
    ) ** -0.5


def logits(
    model: Model, weights: Float[Array, "V D"], hidden: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """Returns the float32 logits of the next tokens.

    Args:
      model: the settings of the model.
      weights: the matrix that `output_weights` returns.
      hidden: the final vectors of the tokens, `DecoderOutput.hidden`.
    """
    return transposed_product(hidden, weights.astype(hidden.dtype)) * logit_scale(model)
