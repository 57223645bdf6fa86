"""Export of a decoder of brt as a model of one of transformers' classes, and a comparison of what
brt and transformers compute.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from brt.config import Adapter, Model
from brt.errors import CheckpointError
from brt.interop.exporting import ExportFormat
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import reading, weights
from brt.interop.huggingface.causal.config import is_same_function, to_theirs
from brt.interop.huggingface.causal.families import FAMILIES, own_arrays, own_name
from brt.interop.huggingface.decoder.export_format import TrainedDecoder, segment_logits
from brt.interop.huggingface.verify import check_logits, compare_arrays, transformers_output
from brt.interop.huggingface.weights import Arrays
from brt.interop.pretrained import parameter_count

_LONGEST = 256  # The compared document has at most this number of tokens.


def to_format(trained: TrainedDecoder, family: str) -> ExportFormat:
    """Returns the content of a directory that transformers reads with its class of `family`, the
    family that `family_of` returned for the model.
    """
    model, params = trained.model, trained.params
    plain = dict(weights.export_arrays(params, model))
    exported = own_arrays(plain, FAMILIES[family], model.heads)
    settings = to_theirs(model, trained.bos_id, family)

    def verify(directory: Path) -> Iterator[str]:
        return compare(params, model, directory, exported, files.read_tensors(directory))

    notes = _notes(model, family)
    summary = (
        f"{family} of {model.layers} layers, width {model.model_dim}, "
        f"{parameter_count(params):,} parameters"
    )
    ids = {name: settings[name] for name in ("bos_token_id", "eos_token_id")}
    described = {"config.json": settings, "generation_config.json": ids}
    return ExportFormat(summary, described, exported, verify, notes=notes)


def _notes(model: Model, family: str) -> tuple[str, ...]:
    if is_same_function(model, family):
        return ()
    context = model.rotary.context or model.window
    return (
        f"transformers will let every token attend to its whole context of up to {context:,} "
        f"tokens, not to a window of {model.window:,} tokens and {model.sliding.sinks} sinks",
    )


def to_adapter(
    settings: Adapter, changed: Mapping[str, Any], base: str, trained: TrainedDecoder, family: str
) -> ExportFormat:
    """Returns the content of a directory from which PEFT reads the adapters of a model.

    Args:
      changed: the factors of the adapters, and other trained parameters.
      base: the directory or hub name of the original model, or "" if the original model is not in
        Hugging Face's format.
      trained: the model with the adapters added.
      family: the family that `family_of` returned for the model.
    """
    arrays = _adapter_arrays(changed, trained.params, trained.model, family)
    config = _adapter_config(settings, arrays, base)

    def verify(directory: Path) -> Iterator[str]:
        written = files.read_file(directory / reading.FILE)
        if base:
            yield from compare(trained.params, trained.model, directory, arrays, written)
            return
        yield from compare_arrays(arrays, written)

    matrices = len(config["target_modules"])
    summary = f"adapters of rank {settings.rank} for {matrices} matrices"
    if whole := len(arrays) - 2 * matrices:
        summary += f", {whole} arrays that were trained as a whole"
    return ExportFormat(
        summary, {reading.CONFIG: config}, arrays, verify,
        notes=_notes(trained.model, family),
        file=reading.FILE,
    )  # fmt: skip


def _adapter_arrays(
    trained: Mapping[str, Any], params: Mapping[str, Any], model: Model, family: str
) -> dict[str, np.ndarray]:
    # Returns the arrays of an adapter by PEFT's names. `trained` has the factors of brt's adapters
    # by the names of their kernels, and the parameters that were trained as a whole; `params` are
    # the parameters of the model, with the adapters added.
    table, plain = FAMILIES[family], dict(weights.export_arrays(params, model))
    arrays, places = {}, weights.places(model)

    def own(name: str) -> str:
        fused = any(f".{part}." in name for one in table.fused for part in one.parts)
        if fused or table.transposed or ".experts." in name:
            raise CheckpointError(
                f"the adapter of {name.removesuffix('.weight')} cannot be exported for "
                f"{table.name}, whose matrices have another layout; export the whole model, "
                "without --adapter"
            )
        return own_name(name, table)

    for path, array in flatten_dict(dict(trained), sep="/").items():
        kernel, _, factor = path.rpartition("/")
        if factor not in ("a", "b"):
            arrays |= {reading.PREFIX + own(name): plain[name] for name in places[path].names}
            continue
        for name, row in zip(places[kernel].names, np.asarray(array), strict=True):
            module = own(name).removesuffix(".weight")
            theirs = f"{reading.PREFIX}{module}.lora_{factor.upper()}.weight"
            arrays[theirs] = np.ascontiguousarray(row.T)
    return arrays


def _adapter_config(adapter: Adapter, arrays: Arrays, base: str) -> dict[str, Any]:
    # Returns the content of adapter_config.json for `arrays`, the result of `_adapter_arrays`. For
    # `base`, see `to_adapter`.
    names = [name.removeprefix(reading.PREFIX) for name in arrays]
    factors = [match[1] for name in names if (match := reading.FACTOR.fullmatch(name))]
    whole = {name.rpartition(".")[0] for name in names if not reading.FACTOR.fullmatch(name)}
    alpha = adapter.alpha
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None,
        "r": adapter.rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted(set(factors)), "modules_to_save": sorted(whole) or None,
    }  # fmt: skip


def document(model: Model) -> np.ndarray:
    """Returns a document of T random tokens (int32) for which brt and transformers should compute
    the same logits.

    A model of brt may have a shorter window than the model of transformers, and sinks, which
    transformers does not have. Neither this window nor the sinks have an effect on a document that
    is not longer than the window, so T is at most `model.window`.
    """
    blocks = max(1, min(_LONGEST, model.window) // model.block_length)
    size = min(model.window, blocks * model.block_length)
    return np.random.default_rng(0).integers(model.vocab_size, size=size).astype(np.int32)


def brt_logits(params: Mapping[str, Any], model: Model, tokens: np.ndarray) -> np.ndarray:
    """Returns the float32 logits [T, V] for a document [T] and a vocabulary of V tokens."""
    padded = np.pad(tokens, (0, -len(tokens) % model.block_length))
    return segment_logits(params, model, [padded[None]])[0, : len(tokens)]


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
    both = {name: array for name, array in arrays.items() if name in exported}
    rounding = yield from compare_arrays(both, exported)
    tokens = document(model)
    adapter = directory if (directory / reading.CONFIG).is_file() else None
    output = transformers_output(
        reading.base_of(directory) if adapter else directory, "AutoModelForCausalLM",
        {"input_ids": tokens[None]}, adapter=adapter, use_cache=False,
    )  # fmt: skip
    if output is None:
        yield "logits against transformers: not compared; pip install torch transformers peft"
        return
    actual, expected = brt_logits(params, model, tokens), output.logits.float().numpy()[0]
    yield check_logits(actual, expected, f"transformers, {len(tokens)} tokens", rounding)
