"""Kinds of memory that none of the three papers is about, a folder each.

A folder contains the kind's section, layer, state and FLOPs, and registers the kind as a user's
own file would. Importing this package registers all of them.
"""

from brt.memories.compressive import Compressive as Compressive
from brt.memories.dense_memory import DenseMemory as DenseMemory
from brt.memories.memorizing import Memorizing as Memorizing
from brt.memories.routing import Routing as Routing
from brt.memories.summary import Summaries as Summaries
