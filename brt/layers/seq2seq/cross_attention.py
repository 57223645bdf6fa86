"""Cross-attention of the decoder to the source, of the kind that the setting `CrossAttention.kind`
names.

In shapes, B is the number of sources, S and T the numbers of source and target tokens, N the number
of beams of a source, and D the width of the model.
"""

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
    """Returns those settings of the section `CrossAttention` (`config`) that the op
    `cross_attention` reads, as the configuration of the op.
    """
    translated: dict[str, Any] = {
        "use_segment": "segment" not in config.without,
        "use_raf": "raf" not in config.without,
        "norm": "none" if "norm" in config.without else "feature",
        "kv_source": "segment" if "remaining" in config.without else "remaining",
        "segment_count": "static" if "segments" in config.count_padding_in else "per_example",
        "mask_kv": "sums" not in config.count_padding_in,
        "smallest_threshold": SMALLEST_THRESHOLD,
        "training_form": "auto",
    }
    names = {field.name for field in dataclasses.fields(CrossConfig)} - translated.keys()
    return CrossConfig(**translated, **{name: getattr(config, name) for name in names})


class ExtraParameters(nn.Module):
    """A module that owns the additional parameters that some kinds of cross-attention have.

    The name of the module selects the group of parameters, such as `raf` for the parameters of
    accumulate-and-fire neurons (see `cross_attention.specifications`).

    Attributes:
      block: sizes and settings of the layer.
      cross: the kind of cross-attention and its settings.
    """

    block: Block
    cross: CrossAttention

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        """Returns the parameters of the group by name."""
        parts = cross_attention.specifications(
            cross_config(self.cross), self.block.heads, self.block.head_dim
        )
        return {
            name: parameter(self, name, spec.shape, spec.axes, spec.initializer)
            for name, spec in parts[str(self.name)].items()
        }


class SourceAttention(Projections):
    """Cross-attention with projections of queries, keys, values and outputs.

    Kinds with additional parameters have further submodules, such as `raf` for accumulate-and-fire
    neurons.

    Attributes:
      cross: the kind of cross-attention and its settings.
    """

    cross: CrossAttention = CrossAttention()

    def setup(self) -> None:
        """Creates the projections, and the additional parameters of the kind of cross-attention."""
        super().setup()
        for part in self._parts():
            setattr(self, part, ExtraParameters(self.block, self.cross))

    def _parts(self) -> dict[str, Any]:
        return cross_attention.specifications(
            cross_config(self.cross), self.block.heads, self.block.head_dim
        )

    def _extra_parameters(self) -> cross_attention.CrossParameters:
        return cross_attention.parameters_from(
            {part: getattr(self, part)() for part in self._parts()}
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, ""]]]:
        """Returns the attention output of all T target tokens, and metrics by name, such as the
        firing rate of accumulate-and-fire neurons; there are no metrics without such neurons.

        Args:
          x: vectors of the target tokens.
          encoded: the encoder's outputs for the S source tokens.
          mask: True for source tokens, False for padding.
        """
        y, aux = cross_attention.attend(
            self.queries(x), self.k(encoded), self.v(encoded), mask, self._extra_parameters(),
            cross_config(self.cross),
            target_length=x.shape[1] if self.training else None, dropout=self.drop(),
            implementation=self.block.kernels.cross_attention,
        )  # fmt: skip
        metrics = {name: value for name, value in aux._asdict().items() if value is not None}
        return self.o(y), metrics

    def prefill(self, encoded: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> CrossCache:
        """Returns the cache of each source, which `step` reads; all beams of a source share the
        cache.

        Args:
          encoded: the encoder's outputs.
          mask: True for source tokens, False for padding.
        """
        keys, values = self.k(encoded), self.v(encoded)
        return cross_attention.prefill(
            keys, values, mask, self._extra_parameters(), cross_config(self.cross)
        )

    def step(
        self, x: Float[Array, "B N D"], cache: CrossCache, position: Int[Array, ""]
    ) -> tuple[Float[Array, "B N D"], CrossCache]:
        """Reads one token of every beam.

        Args:
          x: the vector of each beam's token.
          cache: the cache of the source.
          position: the position of the token in the targets, the same for all beams.

        Returns:
          The attention output of the token, and the cache for the next step.
        """
        config = cross_config(self.cross)
        cache = cross_attention.advance(cache, position, config)
        y = cross_attention.step(self.queries(x)[:, :, None], cache, position, config)
        return self.o(y[:, :, 0]), cache
