"""Checks that a conversion has not changed an encoder-decoder, by comparing arrays and logits.

The converters of other models use the comparison of arrays, too.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from brt.errors import CheckpointError
from brt.interop.huggingface.config import Described
from brt.models import seq2seq
from brt.models.seq2seq import shift_right

# Float32 logits of the same weights may differ by this number, relative to the largest logit.
LOGIT_TOLERANCE = 1e-4
# Rounding a float32 array to one of these dtypes changes elements by at most this number, relative
# to the largest magnitude in the array.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-10}


class TensorCheck(NamedTuple):
    """The result of comparing an array before and after a conversion.

    Attributes:
      dtype: the dtype after the conversion.
      difference: the largest absolute difference of an element.
      allowed: the largest difference that rounding to `dtype` can explain.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    difference: float
    allowed: float


class Inputs(NamedTuple):
    """Two random pairs of source and target, on which brt and transformers are compared.

    Attributes:
      source: int32 [2, X], ids of the sources' tokens; the second source is half as long.
      mask: bool [2, X], False for padding of the sources.
      targets_in: int32 [2, T], the input ids of the decoder.
    """

    source: np.ndarray
    mask: np.ndarray
    targets_in: np.ndarray


def inputs(described: Described) -> Inputs:
    """Returns two random pairs of a source (at most 64 tokens) and a target (at most 16 tokens)."""
    model, special = described.model, described.special
    rng = np.random.default_rng(0)
    known = model.max_positions if model.family == "bart" else 64
    lengths = np.array([min(known, 64), max(min(known, 64) // 2, 1)])
    mask = np.arange(lengths[0])[None] < lengths[:, None]
    source = rng.integers(model.vocab_size, size=mask.shape)
    labels = rng.integers(model.vocab_size, size=(2, min(known, 16)))
    source = np.where(mask, source, special.pad)
    return Inputs(source.astype(np.int32), mask, shift_right(labels, special).astype(np.int32))


def logits(params: Mapping[str, Any], described: Described, x: Inputs) -> np.ndarray:
    """Returns brt's float32 logits [2, T, V], where V is the size of the vocabulary."""
    network = seq2seq.Seq2Seq(described.model, described.cross)
    mask = jnp.asarray(x.mask)
    encoded = seq2seq.encode(network, params, jnp.asarray(x.source), mask)
    hidden, _ = seq2seq.decode(network, params, encoded, mask, jnp.asarray(x.targets_in))
    return np.asarray(seq2seq.logits(seq2seq.readout(described.model, params), hidden))


def transformers_logits(directory: Path, x: Inputs) -> np.ndarray | None:
    """Returns the float32 logits [2, T, V] that transformers computes for the checkpoint in a
    directory; None if torch or transformers is not installed.

    No code in the directory is run, and nothing is unpickled.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return None
    torch = importlib.import_module("torch")
    classes = importlib.import_module("transformers").AutoModelForSeq2SeqLM
    safe = {"trust_remote_code": False, "use_safetensors": True}
    model = classes.from_pretrained(directory, torch_dtype=torch.float32, **safe).eval()
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(x.source, dtype=torch.long),
            attention_mask=torch.tensor(x.mask, dtype=torch.long),
            decoder_input_ids=torch.tensor(x.targets_in, dtype=torch.long),
        )
    return out.logits.numpy()


def tensor_checks(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> list[TensorCheck]:
    """Returns a comparison of every array of `before` with the array of the same name in `after`,
    which may be rounded to another dtype. Raises CheckpointError if an array is missing.
    """
    checks = []
    for name, array in before.items():
        if name not in after:
            raise CheckpointError(f"{name} is missing after the conversion")
        wide, other = (np.asarray(x, np.float64) for x in (array, after[name]))
        largest = float(np.abs(wide).max(initial=0.0))
        dtype = str(after[name].dtype)
        difference = float(np.abs(wide - other).max(initial=0.0))
        allowed = ROUNDING.get(dtype, 0.0) * largest if dtype != str(array.dtype) else 0.0
        checks.append(TensorCheck(name, array.shape, dtype, difference, allowed))
    return checks


def comparison_report(checks: list[TensorCheck]) -> str:
    """Returns the comparisons of arrays as a text for the user: a line for each array that changed,
    and the number of unchanged arrays.
    """
    changed = [check for check in checks if check.difference > 0]
    width = max((len(check.name) for check in changed), default=0)
    lines = [
        f"{check.name:<{width}}  {'x'.join(map(str, check.shape)) or 'scalar':>14}  "
        f"{check.dtype:<9} {check.difference:.1e}"
        for check in changed
    ]
    head = [f"{'array':<{width}}  {'shape':>14}  {'dtype':<9} largest difference"] if lines else []
    return "\n".join([*head, *lines, f"{len(checks) - len(changed)} arrays are bit-equal"])


def refuse_changes(checks: list[TensorCheck]) -> None:
    """Raises CheckpointError if one of the compared arrays changed by more than rounding can
    explain.
    """
    wrong = [c for c in checks if not c.difference <= c.allowed]
    if wrong:
        worst = max(wrong, key=lambda c: c.difference)
        raise CheckpointError(
            f"{len(wrong)} arrays changed in the conversion, most of all {worst.name} "
            f"by {worst.difference:.1e}"
        )


def check_logits(actual: np.ndarray, expected: np.ndarray, name: str, rounding: float = 0.0) -> str:
    """Returns a line for the user with the largest difference of logits, or raises CheckpointError
    if it is larger than rounding can explain.

    Args:
      actual: the logits of the converted model.
      expected: the logits of the original model.
      name: the name of the original model, for messages.
      rounding: the relative rounding error of the weights, a value of `ROUNDING`.
    """
    largest = float(np.abs(expected).max())
    difference = float(np.abs(actual - expected).max())
    line = (
        f"logits against {name}: largest difference {difference:.1e} (largest logit {largest:.1f})"
    )
    if not difference <= allowed(expected, rounding):
        raise CheckpointError(line)
    return line


def allowed(expected: np.ndarray, rounding: float) -> float:
    """Returns the largest absolute difference from the logits `expected` that rounding can explain;
    `rounding` is that of the weights, a value of `ROUNDING`.
    """
    return (LOGIT_TOLERANCE + 32 * rounding) * max(float(np.abs(expected).max()), 1.0)
