"""Converts Hugging Face's arrays of encoder-decoders to brt's parameters, and back.

In names of variables, `ours` stands for brt and `theirs` for Hugging Face.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from brt.config import CrossAttention, Seq2Seq
from brt.errors import CheckpointError
from brt.interop.huggingface import names
from brt.interop.huggingface.layers import by_layer, stack_layers
from brt.models import seq2seq

Arrays = Mapping[str, np.ndarray]
_SHOWN = 4  # An error message lists at most this number of names.


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


def normalize_names(arrays: Arrays, family: str) -> dict[str, np.ndarray]:
    """Returns arrays by the names that current versions of transformers use.

    Some files contain copies of the embedding, or names without the usual prefix. The copies are
    removed, and the prefix is added. `family` is "t5" (also for LongT5) or "bart".
    """
    arrays = {name: array for name, array in arrays.items() if name != names.UNUSED}
    prefix = "model." if family == "bart" else ""
    outside = ("lm_head.weight", "final_logits_bias")
    if prefix:  # In files of the class BartModel, names lack the prefix "model.".
        arrays = {
            name if name.startswith(prefix) or name in outside else prefix + name: array
            for name, array in arrays.items()
        }
    shared = f"{prefix}shared.weight"
    copies = [name if name in outside else prefix + name for name in names.TIED]
    for name in copies:
        if name not in arrays:
            continue
        if shared not in arrays and name not in outside:
            arrays[shared] = arrays[name]
        if shared in arrays and np.array_equal(arrays[name], arrays[shared]):
            del arrays[name]
        elif name not in outside:
            raise CheckpointError(f"{name} differs from {shared}; only one embedding is supported")
    if shared not in arrays and "lm_head.weight" in arrays:
        arrays[shared] = arrays.pop("lm_head.weight")
    return arrays


def template(model: Seq2Seq, cross: CrossAttention) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters' shapes, by names like "encoder/layers_0/mlp/wi/kernel"."""
    return by_layer(jax.eval_shape(partial(_initial, model, cross)))


def import_arrays(arrays: Arrays, model: Seq2Seq, cross: CrossAttention) -> Imported:
    """Converts arrays of a Hugging Face checkpoint, with the names that `normalize_names` returns,
    to brt's parameters. Parameters of cross-attention that the checkpoint lacks are initialised.
    """
    initial = partial(_initial, model, cross)
    return match_arrays(arrays, names.parameter_names(model), initial, names.is_optional)


def match_arrays(
    arrays: Arrays,
    parameter_names: Mapping[str, str],
    initial: Callable[[], dict[str, Any]],
    is_optional: Callable[[str], bool],
) -> Imported:
    """Converts arrays of a Hugging Face checkpoint to brt's parameters by a table of names. Raises
    CheckpointError if a required array is missing, or an array has another shape.

    Args:
      arrays: the arrays by Hugging Face's names.
      parameter_names: Hugging Face's name of each of brt's parameters, by brt's name; in both, {i}
        stands for the index of a layer.
      initial: returns newly initialised parameters of the model. They show the shapes, and replace
        the optional parameters that the checkpoint lacks.
      is_optional: takes brt's name of a parameter and returns True if a checkpoint may lack it.
    """
    left, params, missing, initialised = dict(arrays), {}, [], []
    for ours, leaf in by_layer(jax.eval_shape(initial)).items():
        theirs = names.their_name(parameter_names, ours)
        if theirs not in left:
            optional = is_optional(ours)
            (initialised if optional else missing).append(ours if optional else str(theirs))
            continue
        array, shape = left.pop(theirs), names.their_shape(ours, leaf.shape)
        if array.shape != shape:
            raise CheckpointError(f"{theirs} is {array.shape}, not {shape} as config.json has it")
        params[ours] = jnp.asarray(names.to_ours(ours, array, leaf.shape), jnp.float32)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {listed(missing)}")
    tree = stack_layers({**params, **_initialise(initial, initialised)})
    return Imported(tree, initialised, sorted(left))


def _initial(model: Seq2Seq, cross: CrossAttention) -> dict[str, Any]:
    return nn.meta.unbox(seq2seq.init(seq2seq.Seq2Seq(model, cross), jax.random.key(0)))


def _initialise(initial: Callable[[], dict[str, Any]], wanted: list[str]) -> dict[str, jax.Array]:
    if not wanted:
        return {}
    return jax.jit(lambda: {k: v for k, v in by_layer(initial()).items() if k in wanted})()


def with_cross_attention(
    params: dict[str, Any], model: Seq2Seq, cross: CrossAttention
) -> dict[str, Any]:
    """Returns the parameters of a model for the new settings `cross` of its cross-attention.
    Parameters that `params` lacks are initialised, and those that are not needed are left out.
    """
    have, want = by_layer(params), template(model, cross)
    missing = [name for name in want if name not in have]
    new = _initialise(partial(_initial, model, cross), missing)
    return stack_layers({**{name: have[name] for name in want if name in have}, **new})


def export_arrays(params: Mapping[str, Any], model: Seq2Seq) -> dict[str, np.ndarray]:
    """Returns the parameters of a model as arrays with Hugging Face's names and layouts."""
    known, result, nameless = names.parameter_names(model), {}, []
    for ours, array in by_layer(params).items():
        theirs = names.their_name(known, ours)
        if theirs is None:
            nameless.append(ours)
        else:
            result[theirs] = names.to_theirs(ours, np.asarray(array))
    if nameless:
        raise CheckpointError(f"Hugging Face has no names for {listed(nameless)}")
    if model.family == "t5" and model.tied_logits and not model.scale_logits:
        # A separate lm_head.weight is stored, because versions of transformers before 5 would scale
        # the logits without it.
        result["lm_head.weight"] = result["shared.weight"].copy()
    return result


def mismatches(imported: Imported) -> Iterator[str]:
    """Yields lines of a report for the user, which name the parameters that the checkpoint lacked
    and the arrays that the model does not use.
    """
    for what, names_of_arrays in (
        ("initialised, as the checkpoint lacks them", imported.initialised),
        ("not read, as the model has no use for them", imported.unexpected),
    ):
        if names_of_arrays:
            yield f"{what}: {', '.join(names_of_arrays)}"


def listed(all_names: list[str]) -> str:
    """Returns a list of names for an error message: the first few names, and the number of the
    others.
    """
    more = f" and {len(all_names) - _SHOWN} more" if len(all_names) > _SHOWN else ""
    return ", ".join(all_names[:_SHOWN]) + more
