"""Settings of the decoder's MLPs."""

import dataclasses

from brt.config.fields import inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP:
    """Settings of the decoder's MLPs, besides `Model.mlp_dim` and `Model.activation`."""

    # True multiplies the activations by a second projection of the input (Shazeer 2020).
    gated: bool = inherited(False)
    bias: bool = inherited(False)  # True adds biases to all products.
