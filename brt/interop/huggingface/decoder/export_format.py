"""Settings and arrays of an exported language model, as modeling_brt.py reads them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from brt.config import Model
from brt.errors import CheckpointError
from brt.interop.exporting import ExportFormat
from brt.interop.huggingface.decoder import verify
from brt.interop.pretrained import parameter_count
from brt.layers.attention import TransformerBlock
from brt.layers.recurrent import StateCell
from brt.layers.runs import runs
from brt.layers.sections import Recurrence
from brt.layers.state import has_null_keys
from brt.models.decoder import logit_scale
from brt.ops.gates import GateWeights

CODE = Path(__file__).with_name("modeling_brt.py")
KINDS = ("window", "recurrent")
# These parameters are not exported as they are. The exported arrays `bias`, `scale` and
# `cross_scale`, which are computed from them, take their place.
_FOLDED = {"relative_bias", "alibi_scale", "alibi_bound", "scale", "cross_scale"}


class TrainedDecoder(NamedTuple):
    """A trained language model.

    Attributes:
      params: parameters of `brt.models.decoder.Decoder`.
      model: settings with the vocabulary size set.
      bos_id: id that every text begins with.
    """

    params: PyTree[Array]
    model: Model
    bos_id: int


def to_format(trained: TrainedDecoder, dtype: str) -> ExportFormat:
    """Returns the content of an exported directory: settings, arrays and the model's code.

    Args:
      trained: the model.
      dtype: dtype of the written weights.

    Raises:
      CheckpointError: the model has kinds of layers, or biases, that modeling_brt.py lacks.
    """
    model = trained.model
    for section in model.kinds:
        for kind, layers in section.places().items():
            if kind not in KINDS and layers:
                raise CheckpointError(
                    f"{section.field_of(kind)} = {layers} cannot be exported, because Hugging "
                    f"Face's format has no layers of the kind {kind!r}, only window and recurrent "
                    "ones"
                )
    if set(model.windows) != {model.block_length}:
        raise CheckpointError(
            f"windows of {sorted(set(model.windows))} tokens in blocks of {model.block_length} "
            "cannot be exported to Hugging Face's format; only models whose windows are blocks can"
        )
    if model.mlp.bias:
        raise CheckpointError(
            "MLP.bias = True cannot be exported to Hugging Face's format; only MLPs without "
            "biases can"
        )
    exported = dict(arrays(trained))
    summary = (
        f"decoder of {model.layers} layers, {model.layer_types.count('recurrent')} of them "
        f"recurrent, width {model.model_dim}, window {model.window}, "
        f"{parameter_count(trained.params):,} parameters"
    )
    compare = partial(verify.compare, trained.params, model, exported)
    config = {"config.json": settings(trained, dtype)}
    return ExportFormat(summary, config, exported, compare, code=(CODE,))


def settings(trained: TrainedDecoder, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json; keys that transformers knows have their usual names.

    Args:
      trained: the model.
      dtype: dtype of the written weights.
    """
    m, recurrence = trained.model, trained.model.of(Recurrence)
    bounded = (
        recurrence.gate_layout == "single"
        if recurrence.gate_tanh == "original"
        else recurrence.gate == "lstm"
    )
    return {
        "architectures": ["BrtForCausalLM"],
        "model_type": "brt",
        "auto_map": {
            "AutoConfig": f"{CODE.stem}.BrtConfig",
            "AutoModelForCausalLM": f"{CODE.stem}.BrtForCausalLM",
        },
        "dtype": dtype,
        "vocab_size": m.vocab_size,
        "bos_token_id": trained.bos_id,
        "hidden_size": m.model_dim,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "head_dim": m.head_dim,
        "intermediate_size": m.mlp_dim,
        "logit_scale": logit_scale(m),
        "window": m.window,
        "attend_to_self": m.sliding.attend_to_self,
        "normalize_qk": m.attention.normalize_qk,
        "rotary": m.positions == "rotary",
        "position_bias": m.positions in ("t5", "alibi"),
        "cache": m.sliding.cache,
        "null_keys": has_null_keys(m),
        "recurrent_layers": [i for i, kind in enumerate(m.layer_types) if kind == "recurrent"],
        "states": recurrence.states,
        "gate": recurrence.gate,
        "gate_layout": recurrence.gate_layout,
        "bounded_updates": bounded,
        "feedback": m.feedback,
    }


def arrays(trained: TrainedDecoder) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the float32 array of every exported parameter of `trained`.

    The position biases of a layer are exported as one array, indexed by the distance of key and
    query.
    """
    params, model, first = trained.params, trained.model, 0
    for name in ("embedding", "norm"):
        yield f"decoder.{name}", np.asarray(params[name], np.float32)
    for run, kind, count, _ in runs(model):
        for i in range(count):
            layer_params = jax.tree.map(lambda rows, i=i: rows[i], params["stack"][run])
            for name, array in _layer(model, kind, layer_params).items():
                yield f"decoder.layers.{first + i}.{name}", np.asarray(array, np.float32)
        first += count


def _layer(model: Model, kind: str, params: PyTree[Array]) -> dict[str, Array]:
    tokens, recurs = params["tokens"], kind == "recurrent"
    arrays = {name: array for name, array in tokens.items() if name not in _FOLDED}
    block = TransformerBlock(model, cross_attends=recurs or model.feedback)
    call = partial(block.apply, {"params": tokens})
    arrays["scale"] = call(method="query_scale")
    if block.cross_attends:
        arrays["cross_scale"] = call("cross_scale", method="query_scale")
    if (bias := call(method="bias")) is not None:
        arrays["bias"] = bias
    return arrays | (_cell(model, params["cell"]) if recurs else {})


def _cell(model: Model, params: PyTree[Array]) -> dict[str, Array]:
    weights: Any = StateCell(model).apply({"params": params}, method=lambda cell: cell.weights)
    arrays = {"cell.initial": params["initial"]}
    for name, value in weights._asdict().items():
        parts = value._asdict() if isinstance(value, GateWeights) else {"": value}
        for part, array in parts.items():
            if array is not None:
                arrays[f"cell.{name}.{part}".removesuffix(".")] = array
    return arrays
