"""Cross-attention of the decoder to the source, of the kind that `CrossAttention.kind` names.

In shapes, B is the number of sources, S and T of source and target tokens, N of beams per source.
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
    """Translates the settings of the section `CrossAttention` into the configuration of the op."""
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
    """The additional parameters of some kinds of cross-attention. The name of the module selects a
    group, such as `raf` for accumulate-and-fire neurons (see `cross_attention.specifications`).
    """

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
    """Cross-attention with projections of queries, keys, values and outputs. Kinds with additional
    parameters have further submodules (`ExtraParameters`).
    """

    cross: CrossAttention = CrossAttention()

    def setup(self) -> None:
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
        """Returns the attention output of all target tokens, and metrics by name, such as the
        firing rate of accumulate-and-fire neurons. `mask` is True for source tokens, False for
        padding.
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
        """Returns the cache of each source, which `step` reads for all beams of the source."""
        keys, values = self.k(encoded), self.v(encoded)
        return cross_attention.prefill(
            keys, values, mask, self._extra_parameters(), cross_config(self.cross)
        )

    def step(
        self, x: Float[Array, "B N D"], cache: CrossCache, position: Int[Array, ""]
    ) -> tuple[Float[Array, "B N D"], CrossCache]:
        """Reads the token of every beam at `position`, and returns the cache for the next step."""
        config = cross_config(self.cross)
        cache = cross_attention.advance(cache, position, config)
        y = cross_attention.step(self.queries(x)[:, :, None], cache, position, config)
        return self.o(y[:, :, 0]), cache
