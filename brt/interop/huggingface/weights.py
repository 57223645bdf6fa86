"""Parameters from and to Hugging Face's arrays."""

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
from brt.interop.huggingface.layers import by_layer, stacked
from brt.models import seq2seq

Arrays = Mapping[str, np.ndarray]
_SHOWN = 4  # names in one sentence


class Imported(NamedTuple):
    """Parameters, and what did not match.

    Attributes:
      params: float32, as `Seq2Seq` names them.
      initialised: our parameters that the file lacks: those of the cross-attention, and
        BART's bias of logits, which is zero then.
      unexpected: their arrays that nothing of ours reads.
    """

    params: dict[str, Any]
    initialised: list[str]
    unexpected: list[str]


def normalised(arrays: Arrays, family: str) -> dict[str, np.ndarray]:
    """The arrays under the names of a newly written file: no copies, the usual prefix.

    Raises:
      CheckpointError: encoder and decoder have embeddings of their own.
    """
    arrays = {name: array for name, array in arrays.items() if name != names.UNUSED}
    prefix = "model." if family == "bart" else ""
    outside = ("lm_head.weight", "final_logits_bias")
    if prefix:  # saved as BartModel: without it
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
    """Our parameters' shapes by their names, as "encoder/layers_0/mlp/wi/kernel"."""
    return by_layer(jax.eval_shape(partial(_initial, model, cross)))


def import_arrays(arrays: Arrays, model: Seq2Seq, cross: CrossAttention) -> Imported:
    """Their arrays (see `normalised`) as our parameters.

    Raises:
      CheckpointError: arrays that are missing, or of another shape.
    """
    return matched(arrays, names.table(model), partial(_initial, model, cross), names.is_optional)


def matched(
    arrays: Arrays,
    table: Mapping[str, str],
    initial: Callable[[], dict[str, Any]],
    is_optional: Callable[[str], bool],
) -> Imported:
    """Their arrays as our parameters, by a table {our name: theirs}.

    Args:
      initial: draws our parameters, of which those are that are optional and missing.

    Raises:
      CheckpointError: arrays that are missing, or of another shape.
    """
    left, found, missing, initialised = dict(arrays), {}, [], []
    for ours, leaf in by_layer(jax.eval_shape(initial)).items():
        theirs = names.their_name(table, ours)
        if theirs not in left:
            known = is_optional(ours)
            (initialised if known else missing).append(ours if known else str(theirs))
            continue
        array, shape = left.pop(theirs), names.their_shape(ours, leaf.shape)
        if array.shape != shape:
            raise CheckpointError(f"{theirs} is {array.shape}, not {shape} as config.json has it")
        found[ours] = jnp.asarray(names.to_ours(ours, array, leaf.shape), jnp.float32)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {listed(missing)}")
    params = stacked({**found, **_drawn(initial, initialised)})
    return Imported(params, initialised, sorted(left))


def _initial(model: Seq2Seq, cross: CrossAttention) -> dict[str, Any]:
    return nn.meta.unbox(seq2seq.init(seq2seq.Seq2Seq(model, cross), jax.random.key(0)))


def _drawn(initial: Callable[[], dict[str, Any]], wanted: list[str]) -> dict[str, jax.Array]:
    """Some of the initial parameters."""
    if not wanted:
        return {}
    return jax.jit(lambda: {k: v for k, v in by_layer(initial()).items() if k in wanted})()


def with_cross_attention(
    params: dict[str, Any], model: Seq2Seq, cross: CrossAttention
) -> dict[str, Any]:
    """The parameters for another kind of cross-attention: what it lacks is initialised."""
    have, want = by_layer(params), template(model, cross)
    new = _drawn(partial(_initial, model, cross), [name for name in want if name not in have])
    return stacked({**{name: have[name] for name in want if name in have}, **new})


def export_arrays(params: Mapping[str, Any], model: Seq2Seq) -> dict[str, np.ndarray]:
    """Our parameters as their arrays, in their names.

    Raises:
      CheckpointError: parameters that Hugging Face has no names for.
    """
    table, result, nameless = names.table(model), {}, []
    for ours, array in by_layer(params).items():
        theirs = names.their_name(table, ours)
        if theirs is None:
            nameless.append(ours)
        else:
            result[theirs] = names.to_theirs(ours, np.asarray(array))
    if nameless:
        raise CheckpointError(f"Hugging Face has no names for {listed(nameless)}")
    if model.family == "t5" and model.tied_logits and not model.scale_logits:
        # Transformers before 5 takes unscaled logits for a sign that this is not the embedding.
        result["lm_head.weight"] = result["shared.weight"].copy()
    return result


def mismatches(imported: Imported) -> Iterator[str]:
    """Lines that name what did not match."""
    for what, found in (
        ("initialised, as the checkpoint lacks them", imported.initialised),
        ("not read, as the model has no use for them", imported.unexpected),
    ):
        if found:
            yield f"{what}: {', '.join(found)}"


def listed(found: list[str]) -> str:
    """The first few names, and how many there are besides."""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
