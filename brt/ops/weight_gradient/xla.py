"""One product of all steps, which their pairs are copied into one array for."""

from brt.ops.dense import weight_gradient as weight_gradient
