"""Kinds of layers with a memory that are not from the three papers that brt implements.

Each kind has a folder with the kind's section of settings, its layer, the layer's state and its
FLOPs. The folder registers the kind in the same way as a user's own file would. Importing this
package registers all these kinds.
"""

from brt.memories.compressive import Compressive as Compressive
from brt.memories.dense_memory import DenseMemory as DenseMemory
from brt.memories.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from brt.memories.memorizing import Memorizing as Memorizing
from brt.memories.rg_lru import RGLRU as RGLRU
from brt.memories.routing import Routing as Routing
from brt.memories.summary import Summaries as Summaries
