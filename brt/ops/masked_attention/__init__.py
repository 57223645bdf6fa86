"""Softmax attention under a mask, with a bias: encoder, decoder and cached decoder alike."""

from brt.ops.masked_attention.api import attend as attend
from brt.ops.masked_attention.api import attend_to_valid as attend_to_valid
from brt.ops.masked_attention.api import valid_mask as valid_mask
