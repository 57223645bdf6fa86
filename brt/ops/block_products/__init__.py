"""Products of the few rows of a block with weights: one input with several kernels, and sums of
several products.
"""

from brt.ops.block_products.api import gathered as gathered
from brt.ops.block_products.api import spread as spread
from brt.ops.block_products.api import summed as summed
