"""RMS normalization of an input that a residual connection reads, too."""

from brt.ops.residual_norm.api import residual_norm as residual_norm
