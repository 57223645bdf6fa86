"""Weight gradients from the inputs and output gradients of the steps of a loop."""

from brt.ops.weight_gradient.api import weight_gradient as weight_gradient
