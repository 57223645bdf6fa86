"""Compares the weights of a decoder before and after a conversion, and the logits that brt and
transformers compute with them.
"""

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
from brt.interop.huggingface.causal import adapters
from brt.models.decoder import Decoder, logits, new_state, output_weights

_LONGEST = 256  # The compared document has at most this number of tokens.


def document(model: Model) -> np.ndarray:
    """Returns a document of T random tokens (int32) for which brt and transformers should compute
    the same logits.

    A model of brt may have a shorter window than the model of transformers, and sinks, which
    transformers does not have. Neither has an effect on a document that is not longer than the
    window, so T is at most `model.window`.
    """
    blocks = max(1, min(_LONGEST, model.window) // model.block_length)
    size = min(model.window, blocks * model.block_length)
    return np.random.default_rng(0).integers(model.vocab_size, size=size).astype(np.int32)


def brt_logits(params: Mapping[str, Any], model: Model, tokens: np.ndarray) -> np.ndarray:
    """Returns the float32 logits [T, V] for a document [T] and a vocabulary of V tokens."""
    length = model.block_length
    padded = np.zeros((1, -(-len(tokens) // length) * length), np.int32)
    padded[0, : len(tokens)] = tokens
    start = np.zeros((1, padded.shape[1] // length), bool)
    start[0, 0] = True

    @jax.jit
    def read(params: Mapping[str, Any]) -> jax.Array:
        output: Any = Decoder(model).apply(
            {"params": params}, jnp.asarray(padded), new_state(model, 1), jnp.asarray(start)
        )
        return logits(model, output_weights(model, params), output.hidden)

    return np.asarray(read(params))[0, : len(tokens)]


def transformers_logits(directory: Path, tokens: np.ndarray) -> np.ndarray | None:
    """Returns the float32 logits [T, V] that transformers computes for a document [T]; None if
    torch, transformers or, for the directory of an adapter, PEFT is not installed.
    """
    adapter = (directory / adapters.CONFIG).is_file()
    needed = ("torch", "transformers", *(["peft"] if adapter else []))
    if any(importlib.util.find_spec(name) is None for name in needed):
        return None
    torch = importlib.import_module("torch")
    kind = importlib.import_module("transformers").AutoModelForCausalLM
    safe = {"trust_remote_code": False, "use_safetensors": True}
    base = adapters.base_of(directory) if adapter else directory
    model = kind.from_pretrained(base, dtype=torch.float32, **safe).eval()
    if adapter and base != directory:  # transformers itself adds an adapter beside the model.
        model.load_adapter(str(directory))
    with torch.no_grad():
        out = model(input_ids=torch.tensor(tokens[None], dtype=torch.long), use_cache=False)
    return out.logits.float().numpy()[0]


def compare(
    params: Mapping[str, Any], model: Model, directory: Path, arrays: Mapping[str, np.ndarray],
    exported: Mapping[str, np.ndarray],
) -> Iterator[str]:  # fmt: skip
    """Yields the lines of a report on a conversion of a decoder from or to Hugging Face's format.

    The arrays before and after the conversion must be equal up to rounding, and brt and
    transformers must compute the same logits up to rounding. Otherwise CheckpointError is raised.

    Args:
      directory: the directory from which transformers reads the model.
      arrays: the arrays before the conversion, by Hugging Face's names.
      exported: the arrays after the conversion, by Hugging Face's names.
    """
    checks = verify.tensor_checks({k: v for k, v in arrays.items() if k in exported}, exported)
    yield verify.comparison_report(checks)
    verify.refuse_changes(checks)
    rounding = max(verify.ROUNDING.get(check.dtype, 0.0) for check in checks)
    tokens = document(model)
    expected = transformers_logits(directory, tokens)
    if expected is None:
        yield "logits against transformers: not compared; pip install torch transformers peft"
        return
    actual = brt_logits(params, model, tokens)
    yield verify.check_logits(actual, expected, f"transformers, {len(tokens)} tokens", rounding)
