"""Matrix products of the few rows (tokens) of a block with weight arrays, called kernels.

`shared_input_matmul` multiplies one input with several kernels. `summed_matmul` adds up the
products of several inputs, each with its own kernel.
"""

from brt.ops.block_products.api import shared_input_matmul as shared_input_matmul
from brt.ops.block_products.api import summed_matmul as summed_matmul
