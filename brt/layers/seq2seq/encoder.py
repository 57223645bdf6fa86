"""The encoder of an encoder-decoder. B is the number of sources, T of (padded) source tokens."""

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.config import Attention
from brt.layers.attention_kinds import kind_of_length
from brt.layers.seq2seq.ends import Ends, check_length, relative_bias
from brt.layers.transformer.attention import SharedInputs
from brt.layers.transformer.encoder_layer import EncoderLayer
from brt.layers.transformer.stacked import layer_keys, stacked
from brt.ops.encoder_attention import global_blocks, global_key_bias
from brt.ops.relative_bias import bias_tile, offset_bias


class Encoder(Ends):
    """All layers of the encoder, which map embedded source tokens to hidden vectors."""

    attention: Attention = Attention()

    def setup(self) -> None:
        super().setup()
        m, has_globals = self.model, self.model.encoder_attention == "transient_global"
        if has_globals:
            self.global_rel_bias = relative_bias(m)
        self.layers = stacked(EncoderLayer, m.encoder_layers, remat=m.remat)(
            self.block, self.training, self.attention,
            radius=0 if m.encoder_attention == "full" else m.encoder_radius,
            has_globals=has_globals,
        )  # fmt: skip

    def __call__(
        self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"], key: jax.Array
    ) -> Float[Array, "B T D"]:
        """Returns the hidden vectors of the source tokens. `mask` is False for padding, which is at
        the end of a row; `key` is for kinds of attention that draw random numbers.
        """
        check_length(self.model, x.shape[1], "source")
        keys = layer_keys(key, self.model.encoder_layers)
        x, _ = self.layers(self.enter(x), keys, self._shared_inputs(mask))
        return self.leave(x)

    def _shared_inputs(self, mask: Bool[Array, "B T"]) -> SharedInputs:
        m = self.model
        if m.family == "bart":
            return SharedInputs(mask)
        table, tokens = self.rel_bias.embedding, mask.shape[1]
        both = {"max_distance": m.relative_max_distance, "both_ways": True}
        if m.encoder_attention == "full" and kind_of_length(self.attention, tokens) != "full":
            distances = np.arange(1 - tokens, tokens)
            return SharedInputs(mask, distance_bias=offset_bias(table, distances, **both))
        if m.encoder_attention == "full":
            return SharedInputs(mask, bias_tile(table, tokens, tokens, **both))
        block = m.encoder_radius + 1
        bias = bias_tile(table, block, 3 * block, first=-block, **both)
        if m.encoder_attention != "transient_global":
            return SharedInputs(mask, bias)
        blocks = global_blocks(mask, m.global_block)
        global_bias = global_key_bias(
            self.global_rel_bias.embedding, blocks, max_distance=m.relative_max_distance
        )
        return SharedInputs(mask, bias, blocks=blocks, global_bias=global_bias)
