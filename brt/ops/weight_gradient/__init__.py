"""Weight gradients from the pairs of inputs and output gradients that the steps of a loop
return.
"""

from brt.ops.weight_gradient.api import weight_gradient as weight_gradient
