"""Compares the logits of a decoder by brt with those by transformers."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brt.config import Model
from brt.interop.huggingface import verify
from brt.models.decoder import Decoder, logits, new_state, output_weights

_LONGEST = 256  # The compared document has at most this number of tokens.


def document(model: Model) -> np.ndarray:
    """Returns a document of random tokens, int32 [T], for which brt and transformers should compute
    the same logits.

    A model of brt may have a shorter window than the model of transformers, and sinks, which
    transformers does not have. Both have no effect on a document that is not longer than the
    window, so T is at most `model.window`.
    """
    blocks = max(1, min(_LONGEST, model.window) // model.block_length)
    size = min(model.window, blocks * model.block_length)
    return np.random.default_rng(0).integers(model.vocab_size, size=size).astype(np.int32)


def brt_logits(params: Mapping[str, Any], model: Model, tokens: np.ndarray) -> np.ndarray:
    """Returns the float32 logits [T, V] that brt computes for a document.

    Args:
      params: parameters of the model.
      model: settings of the model.
      tokens: int32 [T], the tokens of the document.
    """
    length = model.block_length
    padded = np.zeros((1, -(-len(tokens) // length) * length), np.int32)
    padded[0, : len(tokens)] = tokens
    start = np.zeros((1, padded.shape[1] // length), bool)
    start[0, 0] = True

    @jax.jit
    def read(params: Mapping[str, Any]) -> jax.Array:
        """Returns the logits [1, padded T, V] of the padded document."""
        output: Any = Decoder(model).apply(
            {"params": params}, jnp.asarray(padded), new_state(model, 1), jnp.asarray(start)
        )
        return logits(model, output_weights(model, params), output.hidden)

    return np.asarray(read(params))[0, : len(tokens)]


def transformers_logits(directory: Path, tokens: np.ndarray) -> np.ndarray | None:
    """Returns the float32 logits [T, V] of transformers, or None if it is not installed.

    Args:
      directory: directory of the Hugging Face checkpoint.
      tokens: the tokens of a document.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return None
    torch = importlib.import_module("torch")
    kind = importlib.import_module("transformers").AutoModelForCausalLM
    safe = {"trust_remote_code": False, "use_safetensors": True}
    model = kind.from_pretrained(directory, dtype=torch.float32, **safe).eval()
    with torch.no_grad():
        out = model(input_ids=torch.tensor(tokens[None], dtype=torch.long), use_cache=False)
    return out.logits.float().numpy()[0]


def compare(
    params: Mapping[str, Any], model: Model, directory: Path, arrays: Mapping[str, np.ndarray],
    exported: Mapping[str, np.ndarray],
) -> Iterator[str]:  # fmt: skip
    """Yields the lines of a comparison of a model with its directory in Hugging Face's format.

    Args:
      params: brt's parameters.
      model: the settings.
      directory: the directory in Hugging Face's format.
      arrays: the arrays of the directory.
      exported: the arrays that brt writes for these parameters.

    Raises:
      CheckpointError: arrays or logits differ.
    """
    checks = verify.tensor_checks({k: v for k, v in arrays.items() if k in exported}, exported)
    yield verify.text(checks)
    verify.check(checks)
    rounding = max(verify.ROUNDING.get(check.dtype, 0.0) for check in checks)
    tokens = document(model)
    expected = transformers_logits(directory, tokens)
    if expected is None:
        yield "logits against transformers: not compared; pip install torch transformers"
        return
    actual = brt_logits(params, model, tokens)
    yield verify.check_logits(actual, expected, f"transformers, {len(tokens)} tokens", rounding)
