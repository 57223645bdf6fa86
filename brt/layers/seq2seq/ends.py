"""Embeddings of positions and norms around the layers of an encoder or a decoder."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

from brt.config import Kernels, Seq2Seq
from brt.errors import ConfigError
from brt.layers.basic import dropout, parameter
from brt.layers.transformer.block import of_seq2seq
from brt.layers.transformer.linear import DEVIATION, POSITION_OFFSET, Embedding


class Ends(nn.Module):
    """Base class of `Encoder` and `Decoder`: the computations before and after the layers.

    In BART, the position embeddings `pos_embed` and the norm `embed_norm` come before the first
    layer. In T5, the norm `final_norm` comes after the last layer, and all layers share the table
    `rel_bias` of relative position biases.
    """

    model: Seq2Seq
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        m = self.model
        self.block = of_seq2seq(m, self.kernels)
        if m.family == "t5":
            self.rel_bias = relative_bias(m)
            self.final_norm = self.block.new_norm()
            return
        self.pos_embed = parameter(
            self, "pos_embed", (m.max_positions + POSITION_OFFSET, m.model_dim),
            ("positions", "embed"), nn.initializers.normal(DEVIATION),
        )  # fmt: skip
        self.embed_norm = self.block.new_norm()

    def enter(
        self, x: Float[Array, "B T D"], first: Int[Array, ""] | int = 0
    ) -> Float[Array, "B T D"]:
        """Returns the input of the first layer; the first of the embedded tokens is at `first`."""
        if self.model.family == "bart":
            rows = jax.lax.dynamic_slice_in_dim(
                self.pos_embed, first + POSITION_OFFSET, x.shape[1], axis=0
            )
            x = self.embed_norm(x + rows[None].astype(x.dtype))
        return dropout(self, x, self.model.dropout)

    def leave(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Returns x, after a norm and dropout in T5, and as it is in BART."""
        if self.model.family == "bart":
            return x
        return dropout(self, self.final_norm(x), self.model.dropout)


def relative_bias(model: Seq2Seq) -> Embedding:
    """Returns a module with T5's biases of R buckets of distances and H heads, a table [R, H]."""
    shape = (model.relative_buckets, model.heads)
    return Embedding(shape, ("buckets", "heads"), model.model_dim**-0.5)


def check_length(model: Seq2Seq, length: int, what: str) -> None:
    """Raises ConfigError if a sequence (`what` names it) is longer than BART's positions."""
    if model.family == "bart" and length > model.max_positions:
        raise ConfigError(
            f"a {what} of {length} tokens is longer than Model.max_positions = "
            f"{model.max_positions}; lower Pairs.max_{what}_length or Decoding.max_length, or "
            "extend the positions (brt.models.seq2seq.extend_positions)"
        )
