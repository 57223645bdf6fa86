"""The decoder: XL, sliding-window and block-recurrent models are one; `layer_types` is data."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.layers.basic import ONES, compute_dtype, dropout, parameter
from brt.layers.stack import Stack, StackBlock, StackState, new_stack_state
from brt.ops.normalization import rms_norm
from brt.types import Tokens


class Decoder(nn.Module):
    """A language model over segments or single tokens.

    Attributes:
      model: with its vocabulary size set.
      training: whether dropout is on (needs the rng 'dropout').
      kernels: which implementations of operations run.
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
        self.stack = Stack(m, self.training, self.kernels)
        self.norm = parameter(self, "norm", (m.model_dim,), ("embed",), ONES)

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self.embedding, tokens, axis=0).astype(compute_dtype(self.model))

    def _hidden(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return dropout(self, rms_norm(x, self.norm), self.model.dropout)

    def __call__(
        self, tokens: Tokens, state: StackState, document_start: Bool[Array, "B N"]
    ) -> tuple[Float[Array, "B T D"], StackState]:
        """Reads a segment: the final hidden vectors (see `logits`) and the state after it."""
        x, state = self.stack(self._embed(tokens), state, document_start)
        return self._hidden(x), state

    def open(self, state: StackState) -> StackBlock:
        """Empty blocks behind `state`, for `step` to fill."""
        return self.stack.open(state)

    def step(
        self,
        tokens: Int[Array, " B"],
        state: StackState,
        block: StackBlock,
        position: Int[Array, ""],
    ) -> tuple[Float[Array, "B V"], StackBlock]:
        """Reads one token at `position` of the open blocks: its float32 logits."""
        x, block = self.stack.step(self._embed(tokens[:, None]), state, block, position)
        return logits(self.model, self.embedding, self._hidden(x))[:, 0], block

    def close(self, state: StackState, block: StackBlock) -> StackState:
        """The state after full blocks, as if they had been read as a segment."""
        return self.stack.close(state, block)


def new_state(model: Model, batch: int) -> StackState:
    """The state of `batch` lanes that have read nothing."""
    return new_stack_state(model, batch, compute_dtype(model))


def logit_scale(model: Model) -> float:
    """What hidden @ embedding is multiplied with."""
    return (model.model_dim if model.logit_scale == "model_dim" else model.vocab_size) ** -0.5


def logits(
    model: Model, embedding: Float[Array, "V D"], hidden: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """Float32 logits over the tied embedding."""
    product = jnp.einsum(
        "btd,vd->btv", hidden, embedding.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return product * logit_scale(model)
