"""FLOPs of a decoder's forward pass, counted from its sizes."""

from brt.config import Encoder, Model, Seq2Seq
from brt.layers.runs import runs


def forward_flops_per_token(model: Model) -> int:
    """Returns the FLOPs per token; a train step takes about three times as many.

    Only matrix products are counted, 2 m n k for the product of an m x k and a k x n matrix. The
    step times in Table 1 of Block-Recurrent Transformers therefore do not follow from these FLOPs:
    the authors' code also computed products whose results it did not use.
    """
    layers = sum(run.layers * run.layer_kind.flops(run.model) for run in runs(model))
    return layers + 2 * model.model_dim * model.vocab_size


# FLOPs of the forward pass of encoders and encoder-decoders.
#
# Only matrix products are counted, 2 m n k for the product of an m x k and a k x n matrix.


def encoder_flops(model: Encoder, length: int) -> int:
    """Returns the FLOPs of an encoder without a head, with exact attention, for one sequence."""
    width = model.model_dim
    projections = (3 if model.shared_queries_keys else 4) * 2 * width * width
    attention, mlp = 4 * length * width, 4 * width * model.mlp_dim
    features = 2 * model.features * width
    return length * (model.layers * (projections + attention + mlp) + features)


def seq2seq_flops(model: Seq2Seq, source: int, target: int) -> int:
    """Returns the FLOPs of an encoder-decoder, including the logits, for one pair.

    Attention is counted as full attention, except the encoder's attention to a window around each
    token (LongT5), which is counted with the keys of the window.
    """
    d, width = model.model_dim, model.heads * model.head_dim
    projections = 4 * 2 * d * width
    mlp = (6 if model.activation == "gated_gelu" else 4) * d * model.mlp_dim
    seen = source
    if model.encoder_attention != "full":
        seen = min(source, 2 * model.encoder_radius + 1)
    encoder = source * model.encoder_layers * (projections + 4 * seen * width + mlp)
    # The decoder's cross-attention projects the source to keys and values.
    of_source = source * projections // 2
    of_target = target * (projections + projections // 2 + 4 * (target + source) * width + mlp)
    logits = 2 * target * d * model.vocab_size
    return encoder + model.decoder_layers * (of_source + of_target) + logits
