"""Compares an exported model, run by modeling_brt.py in PyTorch, with the original model in brt:
arrays, logits over several segments, and a generated text.

In shapes, B is the number of texts, T the number of tokens of a segment, and V the number of tokens
in the vocabulary.
"""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Model
from brt.errors import CheckpointError
from brt.interop.huggingface import files
from brt.interop.huggingface import verify as reports
from brt.models.decoder import Decoder, logits, new_state, output_weights

# The comparison reads SEGMENTS segments and generates WRITTEN tokens. In a model with sinks, tokens
# attend to the sinks separately only after the sinks have left the window, so the comparison reads
# more segments than fit into the window, but at most MOST_SEGMENTS.
SEGMENTS, MOST_SEGMENTS, WRITTEN = 3, 18, 32


def compare(
    params: PyTree[Array], model: Model, before: Mapping[str, np.ndarray], directory: Path
) -> Iterator[str]:
    """Compares the model in an exported directory with the original, and yields lines of a report.
    Raises CheckpointError if arrays, logits or tokens differ by more than rounding can explain.
    `before` has the float32 arrays that were exported, by name.
    """
    checks = reports.tensor_checks(before, files.read_tensors(directory))
    yield reports.comparison_report(checks)
    reports.refuse_changes(checks)
    missing = [n for n in ("torch", "safetensors") if importlib.util.find_spec(n) is None]
    if missing:
        yield "logits and text: not compared; pip install torch, and --verify compares them"
        return
    rounding = max(reports.ROUNDING.get(check.dtype, 0.0) for check in checks)
    theirs = import_code(directory).load(directory)
    yield _logits_line(params, model, theirs, rounding)
    yield _text_line(params, model, theirs, rounding)


def import_code(directory: Path) -> ModuleType:
    """Imports modeling_brt.py from a directory, without writing a bytecode cache there."""
    name = "modeling_brt"
    spec: Any = importlib.util.spec_from_file_location(name, directory / f"{name}.py")
    module, writes = importlib.util.module_from_spec(spec), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module


def segment_logits(
    params: PyTree[Array], model: Model, segments: list[Int[np.ndarray, "B T"]]
) -> Float[np.ndarray, "B _ V"]:
    """Returns the float32 logits of several segments of a text, which brt's model reads one after
    another, with the state carried; they are concatenated along the axis of tokens.
    """
    model = dataclasses.replace(model, dtype="float32", remat=False)

    @jax.jit
    def read(state: Any, tokens: Array) -> tuple[Array, Any]:
        start = jnp.zeros((len(tokens), tokens.shape[1] // model.block_length), bool)
        out: Any = Decoder(model).apply({"params": params}, tokens, state, start)
        return logits(model, output_weights(model, params), out.hidden), out.state

    state, pieces = new_state(model, len(segments[0])), []
    for tokens in segments:
        y, state = read(state, jnp.asarray(tokens, jnp.int32))
        pieces.append(np.asarray(y))
    return np.concatenate(pieces, axis=1)


def _logits_line(params: PyTree[Array], model: Model, theirs: Any, rounding: float) -> str:
    torch, rng = importlib.import_module("torch"), np.random.default_rng(0)
    # A model attends to its sinks separately only when they have left the window, so all segments
    # together must be longer than the window.
    beyond = max(model.windows) // model.block_length + 1
    count = min(max(SEGMENTS, beyond + 1), MOST_SEGMENTS) if model.sliding.sinks else SEGMENTS
    segments = list(rng.integers(model.vocab_size, size=(count, 2, model.block_length)))
    pieces, state = [], None
    with torch.no_grad():
        for tokens in segments:
            y, state = theirs(torch.from_numpy(tokens), state)
            pieces.append(y.numpy())
    expected = segment_logits(params, model, segments)
    name = f"{count} segments read by brt"
    return reports.check_logits(np.concatenate(pieces, axis=1), expected, name, rounding)


def _text_line(params: PyTree[Array], model: Model, theirs: Any, rounding: float) -> str:
    # Each token that the PyTorch model generates greedily must have the largest logit in brt.
    torch, window = importlib.import_module("torch"), model.block_length
    # With a prompt of this number of tokens, the generated text crosses the end of a block.
    size = max(window - WRITTEN // 2, 1)
    prompt = np.random.default_rng(1).integers(model.vocab_size, size=(1, size))
    text = theirs.generate(torch.from_numpy(prompt), max_new_tokens=WRITTEN, eos_token_id=[])
    text = text.numpy()
    padded = np.pad(text, ((0, 0), (0, -text.shape[1] % window)))
    expected = segment_logits(params, model, [padded])[0, size - 1 : text.shape[1] - 1]
    chosen = np.take_along_axis(expected, text[0, size:, None], axis=1)[:, 0]
    gap = float(np.max(expected.max(axis=1) - chosen))
    # Rounding may decide which of two nearly equal logits is larger, so small differences are
    # accepted.
    if not gap <= reports.allowed(expected, rounding):
        raise CheckpointError(f"the greedy text has a token whose logit is {gap:.1e} too low")
    return f"greedy text against brt: the same {WRITTEN} tokens"
