"""Kinds of layers whose tokens read a memory in addition to their window or in place of a window.

Each file registers its kinds with `brt.layers.kinds.register_kind`, as a user's own file can do,
too. Importing this package registers the kinds of all files.
"""

from brt.memories.compressive import Compressive as Compressive
from brt.memories.dense_memory import DenseMemory as DenseMemory
from brt.memories.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from brt.memories.memorizing import Memorizing as Memorizing
from brt.memories.rg_lru import RGLRU as RGLRU
from brt.memories.routing import Routing as Routing
from brt.memories.summary import Summaries as Summaries
