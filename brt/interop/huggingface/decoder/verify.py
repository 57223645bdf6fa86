"""Whether modeling_brt.py computes what we do: logits over segments, and a text."""

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
from brt.models.decoder import Decoder, logits, new_state

SEGMENTS, WRITTEN = 3, 32  # blocks that are compared; tokens of the text


def verified(
    params: PyTree[Array], model: Model, before: Mapping[str, np.ndarray], directory: Path
) -> Iterator[str]:
    """Lines of a report on what was written.

    Raises:
      CheckpointError: an array, a logit or a token differs.
    """
    checks = reports.tensor_checks(before, files.read_tensors(directory))
    yield reports.text(checks)
    reports.check(checks)
    missing = [n for n in ("torch", "safetensors") if importlib.util.find_spec(n) is None]
    if missing:
        yield "logits and text: not compared; pip install torch, and --verify compares them"
        return
    rounding = max(reports.ROUNDING.get(check.dtype, 0.0) for check in checks)
    theirs = loaded(directory).load(directory)
    yield _logits_line(params, model, theirs, rounding)
    yield _text_line(params, model, theirs, rounding)


def loaded(directory: Path) -> ModuleType:
    """The code that lies in a directory, which stays as it is."""
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
    """Float32, of all segments one after the other; each goes on from the state of the last."""
    model = dataclasses.replace(model, dtype="float32", remat=False)

    @jax.jit
    def read(state: Any, tokens: Array) -> tuple[Array, Any]:
        start = jnp.zeros((len(tokens), tokens.shape[1] // model.window), bool)
        out: Any = Decoder(model).apply({"params": params}, tokens, state, start)
        return logits(model, params["embedding"], out.hidden), out.state

    state, found = new_state(model, len(segments[0])), []
    for tokens in segments:
        y, state = read(state, jnp.asarray(tokens, jnp.int32))
        found.append(np.asarray(y))
    return np.concatenate(found, axis=1)


def _logits_line(params: PyTree[Array], model: Model, theirs: Any, rounding: float) -> str:
    torch, rng = importlib.import_module("torch"), np.random.default_rng(0)
    segments = list(rng.integers(model.vocab_size, size=(SEGMENTS, 2, model.window)))
    found, state = [], None
    with torch.no_grad():
        for tokens in segments:
            y, state = theirs(torch.from_numpy(tokens), state)
            found.append(y.numpy())
    expected = segment_logits(params, model, segments)
    of = f"{SEGMENTS} segments read by brt"
    return reports.check_logits(np.concatenate(found, axis=1), expected, of, rounding)


def _text_line(params: PyTree[Array], model: Model, theirs: Any, rounding: float) -> str:
    """A greedy text is ours where each of its tokens is the one that we find likeliest."""
    torch, window = importlib.import_module("torch"), model.window
    size = max(window - WRITTEN // 2, 1)  # the text goes on beyond the block
    prompt = np.random.default_rng(1).integers(model.vocab_size, size=(1, size))
    text = theirs.generate(torch.from_numpy(prompt), max_new_tokens=WRITTEN).numpy()
    padded = np.pad(text, ((0, 0), (0, -text.shape[1] % window)))
    expected = segment_logits(params, model, [padded])[0, size - 1 : text.shape[1] - 1]
    chosen = np.take_along_axis(expected, text[0, size:, None], axis=1)[:, 0]
    behind = float(np.max(expected.max(axis=1) - chosen))
    if not behind <= reports.allowed(expected, rounding):  # of ties either may be taken
        raise CheckpointError(f"the greedy text has a token whose logit is {behind:.1e} too low")
    return f"greedy text against brt: the same {WRITTEN} tokens"
