"""Softmax attention with a mask and a bias, for encoders, decoders and cached decoding."""

from brt.ops.masked_attention.api import attend as attend
from brt.ops.masked_attention.api import attend_part as attend_part
from brt.ops.masked_attention.api import attend_to_valid as attend_to_valid
