"""Self-attention of an encoder to a sliding window and to optional global tokens (LongT5)."""

from brt.ops.encoder_attention.api import local_attention as local_attention
from brt.ops.encoder_attention.globals import GlobalBlocks as GlobalBlocks
from brt.ops.encoder_attention.globals import GlobalKeys as GlobalKeys
from brt.ops.encoder_attention.globals import block_sums as block_sums
from brt.ops.encoder_attention.globals import global_blocks as global_blocks
from brt.ops.encoder_attention.globals import global_key_bias as global_key_bias
