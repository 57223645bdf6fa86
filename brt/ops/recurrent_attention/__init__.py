"""The recurrent cell: states that attend to a block of tokens, and tokens that attend to states."""

from brt.ops.recurrent_attention.api import state_scan as state_scan
from brt.ops.recurrent_attention.cell import CellWeights as CellWeights
from brt.ops.recurrent_attention.cell import StateKV as StateKV
from brt.ops.recurrent_attention.cell import state_kv as state_kv
from brt.ops.recurrent_attention.cell import tokens_by_head as tokens_by_head
from brt.ops.recurrent_attention.xla import state_update as state_update
