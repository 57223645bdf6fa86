"""Computes the logits of an encoder's head with brt and with transformers, to compare them."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from brt.config import Attention
from brt.interop.huggingface.roberta.config import HEADS, Described
from brt.models import encoder, seq2seq


class Inputs(NamedTuple):
    """Two rows of random token ids, on which brt and transformers are compared.

    Attributes:
      tokens: int32 [2, T]; the second row is half as long as the first.
      valid: bool [2, T], False for padding.
    """

    tokens: np.ndarray
    valid: np.ndarray


def inputs(described: Described) -> Inputs:
    """Returns two rows of at most 64 random tokens that the encoder can read."""
    model, pad = described.model, described.kept.get("pad_token_id", 1)
    rng = np.random.default_rng(0)
    longest = min(model.max_positions, 64)
    lengths = np.array([longest, max(longest // 2, 1)])
    valid = np.arange(longest)[None] < lengths[:, None]
    tokens = rng.integers(model.vocab_size - 1, size=valid.shape)
    # The padding id must not occur among the tokens, because transformers gives padding no
    # position. Therefore this id and all higher ids are raised by one.
    tokens += tokens >= pad
    return Inputs(np.where(valid, tokens, pad).astype(np.int32), valid)


def logits(
    params: Mapping[str, Any], described: Described, x: Inputs, attention: Attention | None = None
) -> np.ndarray:
    """Returns the float32 logits that brt computes, by exact attention without `attention`.

    The logits are [2, T, V] for a masked language model with V tokens in the vocabulary, [2,
    classes] for a classifier, and [2, T, 2] for starts and ends of spans; 0 for padding.
    """
    network = encoder.EncoderWithHead(described.model, attention or Attention(), described.task)
    outputs = network.apply(
        {"params": params}, jnp.asarray(x.tokens), jnp.asarray(x.valid), jax.random.key(0)
    )
    if described.task == "masked_language_modeling":
        outputs = seq2seq.logits(encoder.readout(dict(params)), outputs)
    return _mask_padding(np.asarray(outputs), x)


def transformers_logits(directory: Path, described: Described, x: Inputs) -> np.ndarray | None:
    """Returns the float32 logits that transformers computes, in the form of `logits`; None if torch
    or transformers is not installed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return None
    torch = importlib.import_module("torch")
    kind = getattr(importlib.import_module("transformers"), HEADS[described.task][1])
    model = kind.from_pretrained(directory, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(x.tokens, dtype=torch.long),
            attention_mask=torch.tensor(x.valid, dtype=torch.long),
        )
    if described.task == "spans":
        return _mask_padding(np.stack([out.start_logits, out.end_logits], axis=-1), x)
    return _mask_padding(out.logits.numpy(), x)


def _mask_padding(outputs: np.ndarray, x: Inputs) -> np.ndarray:
    return outputs if outputs.ndim == 2 else np.where(x.valid[..., None], outputs, 0.0)
