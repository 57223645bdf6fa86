"""FLOPs of a decoder's forward pass, counted from its sizes."""

from brt.config import Model
from brt.layers.runs import runs


def forward_flops_per_token(model: Model) -> int:
    """Returns the FLOPs per token; a train step takes about three times as many.

    Only matrix products are counted, 2 m n k for the product of an m x k and a k x n matrix. The
    step times in Table 1 of Block-Recurrent Transformers therefore do not follow from these FLOPs:
    the authors' code also computed products whose results it did not use.
    """
    layers = sum(run.layers * run.layer_kind.flops(run.model) for run in runs(model))
    return layers + 2 * model.model_dim * model.vocab_size
