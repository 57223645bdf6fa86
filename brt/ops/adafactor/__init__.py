"""Adafactor's update of a stack of matrices, with a choice of implementations."""

from brt.ops.adafactor.api import adafactor as adafactor
from brt.ops.adafactor.api import has_kernel as has_kernel
from brt.ops.adafactor.xla import MOMENTUM as MOMENTUM
from brt.ops.adafactor.xla import Moments as Moments
