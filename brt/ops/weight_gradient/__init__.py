"""The gradient of weights from the pairs that the steps of a loop have handed out."""

from brt.ops.weight_gradient.api import weight_gradient as weight_gradient
