"""Products of a block's few rows with weights, from one vector a row to several and back."""

from brt.ops.block_products.api import gathered as gathered
from brt.ops.block_products.api import spread as spread
from brt.ops.block_products.api import summed as summed
