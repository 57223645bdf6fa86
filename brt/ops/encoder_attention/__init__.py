"""Self-attention of long sources: sliding windows, with or without transient global tokens."""

from brt.ops.encoder_attention.api import local_attention as local_attention
from brt.ops.encoder_attention.globals import GlobalBlocks as GlobalBlocks
from brt.ops.encoder_attention.globals import Side as Side
from brt.ops.encoder_attention.globals import block_sums as block_sums
from brt.ops.encoder_attention.globals import global_blocks as global_blocks
from brt.ops.encoder_attention.globals import side_bias as side_bias
