"""Reads encoder-decoders and encoders in Hugging Face's format: T5, LongT5, BART and RoBERTa.

Training can start from a directory in this format. `python -m brt.convert --to=brt` reads such a
directory, writes it again with float32 weights, checks the written model, and can extend the
learned positions of the model.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from brt.config import CrossAttention
from brt.data import originals
from brt.errors import CheckpointError
from brt.interop.huggingface import encoder_decoder, files, roberta, weights
from brt.interop.huggingface.encoder_decoder import EncoderDecoder
from brt.interop.huggingface.roberta import EncoderWithHead
from brt.interop.huggingface.weights import Arrays, Place, kernels, shapes

Described = EncoderDecoder | EncoderWithHead


class Pretrained(NamedTuple):
    """A model that was read from Hugging Face's format, or that is to be written in this format.

    Attributes:
      described: the settings of the model.
    """

    params: dict[str, Any]
    described: Described


class Imported(NamedTuple):
    """Imported parameters, and the names of parameters and arrays that have no counterpart.

    Attributes:
      params: the float32 parameters, a nested dictionary with brt's names.
      initialised: brt's names of the parameters that the checkpoint lacks and that were therefore
        initialised, such as those of a kind of cross-attention that transformers does not have.
      unexpected: Hugging Face's names of the arrays that have no counterpart in brt.
    """

    params: dict[str, Any]
    initialised: list[str]
    unexpected: list[str]


def read(directory: Path) -> tuple[Pretrained, dict[str, np.ndarray], Imported]:
    """Returns the model in a directory, the arrays of the checkpoint by Hugging Face's names, and
    the result of `import_arrays` for these arrays.
    """
    described, arrays = _described(directory)
    imported = import_arrays(arrays, described)
    return Pretrained(imported.params, described), arrays, imported


def describe(directory: Path) -> Described:
    """Returns the settings of the model in a directory."""
    return _described(directory)[0]


def _described(directory: Path) -> tuple[Described, dict[str, np.ndarray]]:
    settings = files.read_json_if_any(directory / "config.json")
    if "model_type" not in settings:
        files.check_is_model(directory)
        raise CheckpointError(
            f"{directory} has no config.json with a model_type; name a model in Hugging Face's "
            "format, or the directory of a run that has checkpoints"
        )
    generation = files.read_json_if_any(directory / "generation_config.json")
    kind: type[Described] = EncoderWithHead
    if settings.get("model_type") != roberta.MODEL_TYPE:
        encoder_decoder.check_type(settings)
        kind = EncoderDecoder
    # The arrays show which head the model has.
    arrays = kind.normalize_names(files.read_tensors(directory), settings)
    return kind.from_theirs(settings, generation, arrays), arrays


def load(directory: Path, cross: CrossAttention | None = None) -> dict[str, Any]:
    """Returns the parameters of the model in a directory.

    If `cross` is given and the model is an encoder-decoder, `cross` replaces the model's settings
    of cross-attention. Parameters that `cross` needs but the directory lacks are initialised.
    """
    params, described = read(directory)[0]
    if cross is None or not isinstance(described, EncoderDecoder):
        return params
    return adapt(params, described._replace(cross=cross))


def _places(described: Described) -> dict[str, Place]:
    names = described.parameter_names()
    leaves = shapes(described.initial_params)
    return {ours: _place(ours, names.get(ours), leaf) for ours, leaf in leaves.items()}


def _place(ours: str, theirs: str | None, leaf: jax.ShapeDtypeStruct) -> Place:
    stacked, shape = "/layers/" in ours, leaf.shape
    names = [] if theirs is None else [theirs]
    if stacked:
        names, shape = [name.format(i=i) for name in names for i in range(shape[0])], shape[1:]
    if ours.endswith("kernel"):
        return kernels(leaf, names, 2 if ours.endswith("/o/kernel") else 1, stacked)
    if ours == "logits_bias":
        return Place(leaf, names, (1, *shape))
    is_vector = len(shape) == 0 or ours.endswith("/bias")
    return Place(leaf, names, (math.prod(shape),) if is_vector else shape)


def import_arrays(arrays: Arrays, described: Described) -> Imported:
    """Converts the arrays of a checkpoint to brt's parameters. The arrays must have the names that
    current versions of transformers use. Raises CheckpointError if a required array is missing, or
    if an array does not have the shape that the model needs.
    """
    places = _places(described)
    optional = [ours for ours in places if described.may_lack(ours)]
    params, left = weights.import_arrays(arrays, places, optional)
    initialised = [ours for ours in places if ours not in params]
    return Imported(_with_initial(params, initialised, described), initialised, sorted(left))


def _with_initial(
    params: Mapping[str, Any], lacking: list[str], described: Described
) -> dict[str, Any]:
    initial = lambda: flatten_dict(described.initial_params(), sep="/").items()  # noqa: E731
    new = (
        jax.jit(lambda: {name: x for name, x in initial() if name in lacking})() if lacking else {}
    )
    return unflatten_dict({**params, **new}, sep="/")


def adapt(params: dict[str, Any], described: Described) -> dict[str, Any]:
    """Returns parameters for the model that `described` describes, from the parameters `params` of
    another model. Parameters that `params` lacks are initialised, and parameters in `params` that
    the new model does not need are left out.
    """
    have, want = flatten_dict(params, sep="/"), shapes(described.initial_params)
    kept = {name: have[name] for name in want if name in have}
    return _with_initial(kept, [name for name in want if name not in have], described)


def export_arrays(params: Mapping[str, Any], described: Described) -> dict[str, np.ndarray]:
    """Returns the parameters of a model as arrays with Hugging Face's names and layouts."""
    return described.with_copies(dict(weights.export_arrays(params, _places(described))))


def tokenizer_files(source: Path) -> list[str]:
    """Returns the names of the files of a tokenizer in a directory."""
    return [name for name in originals.names(source) if name not in originals.MODEL]


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copies the files of a tokenizer between directories, and returns their names."""
    names = tokenizer_files(source)
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        copyfile(source / name, target / name)
    return names


def parameter_count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
