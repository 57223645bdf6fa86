"""Checks that a conversion has not changed a model, by comparing arrays and logits."""

import importlib
import importlib.util
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brt.errors import CheckpointError

# Float32 logits of the same weights may differ by this number, relative to the largest logit.
LOGIT_TOLERANCE = 1e-4
# Rounding a float32 array to one of these dtypes changes elements by at most this number, relative
# to the largest magnitude in the array.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-10}


def transformers_output(
    directory: Path, kind: str, x: Mapping[str, np.ndarray], *, adapter: Path | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Returns what transformers computes for the inputs `x` with the checkpoint in a directory.
    Returns None if torch or transformers is not installed, or if there is an adapter and PEFT is
    not installed.

    No code in the directory is run, and nothing is unpickled.

    Args:
      kind: the name of transformers' class.
      adapter: the directory of an adapter to add, or None. If it is `directory`, transformers adds
        the adapter when it reads the model.
      options: further arguments of the model.
    """
    needed = ("torch", "transformers", *(["peft"] if adapter else []))
    if any(importlib.util.find_spec(name) is None for name in needed):
        return None
    torch = importlib.import_module("torch")
    found = getattr(importlib.import_module("transformers"), kind)
    safe = {"trust_remote_code": False, "use_safetensors": True}
    model = found.from_pretrained(directory, dtype=torch.float32, **safe).eval()
    if adapter and adapter != directory:
        model.load_adapter(str(adapter))
    inputs = {name: torch.tensor(array, dtype=torch.long) for name, array in x.items()}
    with torch.no_grad():
        return model(**inputs, **options)


def compare_arrays(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> Generator[str, None, float]:
    """Compares every array of `before` with the array of the same name in `after`. The arrays in
    `after` may be rounded to another dtype.

    Yields a text for the user: a line for each array that changed, and the number of unchanged
    arrays. Returns the relative rounding error of the arrays in `after`, a value of `ROUNDING`.
    Raises CheckpointError if an array is missing, or if it changed by more than rounding can
    explain.
    """
    changed, wrong, rounding = [], dict[str, float](), 0.0
    for name, array in before.items():
        if name not in after:
            raise CheckpointError(f"{name} is missing after the conversion")
        wide, other = (np.asarray(x, np.float64) for x in (array, after[name]))
        dtype, difference = str(after[name].dtype), float(np.abs(wide - other).max(initial=0.0))
        error = ROUNDING.get(dtype, 0.0)
        rounding = max(rounding, error)
        if difference > 0:
            shape = "x".join(map(str, array.shape)) or "scalar"
            changed.append((name, f"{shape:>14}  {dtype:<9} {difference:.1e}"))
        largest = float(np.abs(wide).max(initial=0.0))
        if not difference <= (error * largest if dtype != str(array.dtype) else 0.0):
            wrong[name] = difference
    width = max((len(name) for name, _ in changed), default=0)
    head = [("array", f"{'shape':>14}  {'dtype':<9} largest difference")] if changed else []
    lines = [f"{name:<{width}}  {text}" for name, text in (*head, *changed)]
    yield "\n".join([*lines, f"{len(before) - len(changed)} arrays are bit-equal"])
    if wrong:
        worst = max(wrong, key=wrong.__getitem__)
        raise CheckpointError(
            f"{len(wrong)} arrays changed in the conversion, most of all {worst} "
            f"by {wrong[worst]:.1e}"
        )
    return rounding


def check_logits(actual: np.ndarray, expected: np.ndarray, name: str, rounding: float = 0.0) -> str:
    """Returns a line for the user with the largest difference of logits. Raises CheckpointError if
    this difference is larger than rounding can explain.

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
    """Returns the largest absolute difference from the logits `expected` that rounding can explain.
    `rounding` is the relative rounding error of the weights, a value of `ROUNDING`.
    """
    return (LOGIT_TOLERANCE + 32 * rounding) * max(float(np.abs(expected).max()), 1.0)
