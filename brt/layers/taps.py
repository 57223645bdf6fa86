"""Accumulators for the weight gradients of layers that are scanned within a scan over blocks.

The backward pass of such a scan does not compute weight gradients block by block. It stores the
inputs and output gradients of matrix products in the accumulators, and one product after the scan
computes the weight gradients of all blocks: the gradients are deferred (`brt.ops.deferred`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from brt.config import Model
from brt.layers.basic import compute_dtype
from brt.ops import deferred
from brt.ops.deferred import LayerTaps, Tap


class TokenTaps(NamedTuple):
    """Accumulators for the kernels of a `TransformerBlock`; `projections` are those of queries,
    keys, cross queries (if there are any) and values.
    """

    projections: Tap | LayerTaps | None = None
    output: Tap | LayerTaps | None = None
    mlp_in: Tap | LayerTaps | None = None
    mlp_out: Tap | LayerTaps | None = None


NO_TAPS = TokenTaps()


def token_taps(model: Model, params: Mapping[str, Any], blocks: int, lanes: int) -> TokenTaps:
    """Returns the accumulators of a run of layers, as `LayerKind.taps` describes."""
    projections = ("queries", "keys", "cross_queries", "values")
    rows, own = (blocks, lanes, model.block_length), params["tokens"]

    def taps_for(*names: str, **options: Any) -> LayerTaps | None:
        # None if accumulators would move more memory than adding up the gradients block by block.
        kernels = tuple(own[name] for name in names if name in own)
        return deferred.layer_taps(kernels, rows, compute_dtype(model), **options)

    output = taps_for("output", inputs=3, of_parts=True, as_bits=True)
    return TokenTaps(
        taps_for(*projections), output, taps_for("mlp_in"), taps_for("mlp_out", as_bits=True)
    )
