"""The gradient of a weight that all steps of a loop use, computed once, after the loop."""

from brt.ops.weight_gradient.api import weight_gradient as weight_gradient
