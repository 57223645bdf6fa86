"""Cross-attention of the decoder to the source, of the kind that `CrossAttention.kind` names."""

import dataclasses
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from brt.config import CrossAttention
from brt.config.seq2seq import SMALLEST_THRESHOLD
from brt.layers.basic import parameter
from brt.layers.transformer.attention import Projections
from brt.layers.transformer.block import Block
from brt.ops import cross_attention
from brt.ops.cross_attention import CrossCache, CrossConfig


def cross_config(config: CrossAttention) -> CrossConfig:
    """Returns the settings of the section `CrossAttention` that the op reads."""
    names = {field.name for field in dataclasses.fields(CrossConfig)} - {"smallest_threshold"}
    return CrossConfig(
        smallest_threshold=SMALLEST_THRESHOLD, **{name: getattr(config, name) for name in names}
    )


class Learned(nn.Module):
    """Parameters of a kind of cross-attention in addition to its projections, under one name."""

    block: Block
    cross: CrossAttention

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        parts = cross_attention.specifications(
            cross_config(self.cross), self.block.heads, self.block.head_dim
        )
        return {
            name: parameter(self, name, spec.shape, spec.axes, spec.initializer)
            for name, spec in parts[str(self.name)].items()
        }


class SourceAttention(Projections):
    """Projections of queries, keys, values and outputs; `raf` holds the parameters of
    accumulate-and-fire neurons.
    """

    cross: CrossAttention = CrossAttention()

    def setup(self) -> None:
        super().setup()
        for part in self._parts():
            setattr(self, part, Learned(self.block, self.cross))

    def _parts(self) -> dict[str, Any]:
        return cross_attention.specifications(
            cross_config(self.cross), self.block.heads, self.block.head_dim
        )

    def _learned(self) -> cross_attention.CrossParameters:
        return cross_attention.parameters_from(
            {part: getattr(self, part)() for part in self._parts()}
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, ""]]]:
        """Reads whole targets; returns the output and metrics."""
        y, aux = cross_attention.attend(
            self.queries(x), self.k(encoded), self.v(encoded), mask, self._learned(),
            cross_config(self.cross),
            target_length=x.shape[1] if self.training else None, dropout=self.drop(),
            implementation=self.block.kernels.cross_attention,
        )  # fmt: skip
        metrics = {name: value for name, value in aux._asdict().items() if value is not None}
        return self.o(y), metrics

    def prefill(self, encoded: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> CrossCache:
        """Computes what decoding steps read, once for each source and for all of its beams."""
        keys, values = self.k(encoded), self.v(encoded)
        return cross_attention.prefill(
            keys, values, mask, self._learned(), cross_config(self.cross)
        )

    def step(
        self, x: Float[Array, "B N D"], cache: CrossCache, position: Int[Array, ""]
    ) -> tuple[Float[Array, "B N D"], CrossCache]:
        """Reads one token of every beam, at `position` of the targets."""
        config = cross_config(self.cross)
        cache = cross_attention.advance(cache, position, config)
        y = cross_attention.step(self.queries(x)[:, :, None], cache, position, config)
        return self.o(y[:, :, 0]), cache
