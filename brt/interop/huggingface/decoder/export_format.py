"""Settings and arrays of an exported language model, as modeling_brt.py reads them.

modeling_brt.py is the PyTorch code that is exported together with the model.
"""

from collections.abc import Iterator, Mapping
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
from brt.layers.reading import speeds_of
from brt.layers.recurrent import StateCell
from brt.layers.runs import Run, runs
from brt.layers.sections import Recurrence
from brt.layers.state import has_null_keys
from brt.memories.dense_memory.section import DenseMemory
from brt.memories.gated_delta_net.section import GatedDeltaNet
from brt.models.decoder import logit_scale
from brt.ops.gates import GateWeights

CODE = tuple(
    Path(__file__).with_name(f"{name}_brt.py") for name in ("modeling", "decoder", "layers")
)
KINDS = (
    "window", "recurrent", "gated_dense_memory", "gated_delta_net", "window_gated_delta_net",
)  # fmt: skip
# The keys are brt's names of activations, and the values are transformers' names of the same
# activations. Other activations have the same name in both.
_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}
# The names of linear maps, as transformers' models have them; brt's names are the keys. The names
# in the memory of Gated DeltaNet are those of its authors' library.
_LINEAR = {
    "queries": "q_proj", "keys": "k_proj", "values": "v_proj", "output": "o_proj",
    "cross_queries": "cross_q_proj", "mlp_in": "up_proj", "mlp_gate": "gate_proj",
    "mlp_out": "down_proj",
}  # fmt: skip
_LINEAR_OF_MEMORY = {
    **{name: _LINEAR[name] for name in ("queries", "keys", "values", "output")},
    "gate": "g_proj", "strength": "b_proj", "step": "a_proj",
}  # fmt: skip
# The exported model reads a text of any length; a number of tokens is stated, because programs read
# texts in pieces without it.
_LONGEST = 2**20
# These parameters of brt are not exported. The arrays `bias`, `scale` and `cross_scale`, which are
# computed from these parameters, are exported in their place.
_FOLDED = {"relative_bias", "alibi_scale", "alibi_bound", "scale", "cross_scale"}


class TrainedDecoder(NamedTuple):
    """A trained language model that is to be exported: parameters of `brt.models.decoder.Decoder`,
    settings with the size of the vocabulary, and the id of the token that every text begins
    with.
    """

    params: PyTree[Array]
    model: Model
    bos_id: int


def to_format(trained: TrainedDecoder, dtype: str) -> ExportFormat:
    """Returns the content of an exported directory: settings, arrays, and the PyTorch code that
    runs the model. Raises CheckpointError for kinds of layers that the code does not implement.
    """
    model = trained.model
    for section in model.kinds:
        for kind, layers in section.layers_by_kind().items():
            if kind not in KINDS and layers:
                raise CheckpointError(
                    f"{section.field_of(kind)} = {layers} cannot be exported, because the PyTorch "
                    f"code of an exported model has no layers of the kind {kind!r}; it has "
                    f"{', '.join(KINDS)}"
                )
    exported = dict(arrays(trained))
    kinds = [
        f"{model.layer_types.count(kind)} of them {kind.replace('_', ' ')}"
        for kind in KINDS[1:]
        if kind in model.layer_types
    ]
    sinks = f", {model.sliding.sinks} sinks" if model.sliding.sinks else ""
    summary = (
        f"{', '.join([f'decoder of {model.layers} layers', *kinds])}, width {model.model_dim}, "
        f"window {model.window}{sinks}, {parameter_count(trained.params):,} parameters"
    )
    compare = partial(verify.compare, trained.params, model, exported)
    config = {"config.json": settings(trained, dtype)}
    return ExportFormat(summary, config, exported, compare, code=CODE)


def settings(trained: TrainedDecoder, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json. Settings that other models of transformers also have get
    the names that are usual there.
    """
    m, recurrence = trained.model, trained.model.of(Recurrence)
    bounded = (
        recurrence.gate_layout == "single"
        if recurrence.gate_tanh == "original"
        else recurrence.gate == "lstm"
    )
    by_layer = [m.for_layer(i) for i in range(m.layers)]
    speeds = [speeds_of(own).radians for own in by_layer] if m.positions == "rotary" else []
    tables = list(dict.fromkeys(speeds))
    module = CODE[0].stem
    return {
        "architectures": ["BrtForCausalLM"],
        "model_type": "brt",
        "auto_map": {
            "AutoConfig": f"{module}.BrtConfig",
            "AutoModelForCausalLM": f"{module}.BrtForCausalLM",
        },
        "dtype": dtype,
        "vocab_size": m.vocab_size,
        "bos_token_id": trained.bos_id,
        "eos_token_id": list(m.end_ids) or None,
        "hidden_size": m.model_dim,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.key_heads,
        "head_dim": m.head_dim,
        "intermediate_size": m.mlp_dim,
        "hidden_act": _ACTIVATIONS.get(m.activation, m.activation),
        "gated_mlp": m.mlp.gated,
        "mlp_bias": m.mlp.bias,
        "attention_bias": m.attention.bias,
        "rms_norm_eps": m.norm.epsilon,
        "norm_offset": m.norm.offset,
        "output_norms": m.norm.outputs,
        "query_key_norms": m.norm.queries_keys,
        "embedding_scaled": m.embedding.scaled,
        "tie_word_embeddings": m.embedding.tied,
        "max_position_embeddings": _LONGEST,
        "logit_scale": logit_scale(m),
        "block": m.block_length,
        "kinds": list(m.layer_types),
        "windows": list(m.windows),
        "sinks": [own.sliding.sinks for own in by_layer],
        "rotary": [tables.index(own) for own in speeds],
        "rotary_speeds": [list(own) for own in tables],
        "position_bias": m.positions in ("t5", "alibi"),
        "attend_to_self": m.sliding.attend_to_self,
        "normalize_qk": m.attention.normalize_qk,
        "cache": m.sliding.cache,
        "null_keys": has_null_keys(m) and m.window_is_block,
        "states": recurrence.states,
        "gate": recurrence.gate,
        "gate_layout": recurrence.gate_layout,
        "bounded_updates": bounded,
        "feedback": m.feedback,
        "memory_size": m.of(DenseMemory).size,
        "delta_sizes": list(m.of(GatedDeltaNet).sizes(m)),
    }


def arrays(trained: TrainedDecoder) -> Iterator[tuple[str, np.ndarray]]:
    """Yields pairs of the name and the float32 array of every exported parameter.

    The position biases of a layer are exported as one array [heads, window], which has the bias of
    every distance between a query and a key in the window, the nearest key first.
    """
    params, model, first = trained.params, trained.model, 0
    tops = {"embedding": "embed_tokens.weight", "norm": "norm", "output": "lm_head.weight"}
    for name in list(tops)[: 2 if model.embedding.tied else 3]:
        yield f"decoder.{tops[name]}", np.asarray(params[name], np.float32)
    for run in runs(model):
        for i in range(run.layers):
            layer_params = jax.tree.map(lambda rows, i=i: rows[i], params["stack"][run.name])
            for name, array in _layer(run, layer_params).items():
                yield f"decoder.layers.{first + i}.{name}", np.asarray(array, np.float32)
        first += run.layers


def _layer(run: Run, params: PyTree[Array]) -> dict[str, Array]:
    others = {name: x for name, x in params.items() if name not in ("tokens", "cell", "memory")}
    arrays = others | _tokens(run, params["tokens"]) if "tokens" in params else others
    arrays = _linear(arrays, _LINEAR)
    for name, array in _linear(params.get("memory", {}), _LINEAR_OF_MEMORY).items():
        arrays[f"memory.{name}"] = array
    return arrays | (_cell(run.model, params["cell"]) if "cell" in params else {})


def _linear(arrays: Mapping[str, Array], names: Mapping[str, str]) -> dict[str, Array]:
    # Linear maps get the names `names`, and the form [out, in].
    renamed = {}
    for name, array in arrays.items():
        kernel = name.removesuffix("_bias")
        if kernel not in names or name == "step_bias":  # The latter is added in float32.
            renamed[name] = array
        elif kernel != name:
            renamed[f"{names[kernel]}.bias"] = array.reshape(-1)
        else:
            size = array.shape[-1] if name == "output" else array.size // array.shape[0]
            renamed[f"{names[name]}.weight"] = array.reshape(-1, size).T
    return renamed


def _tokens(run: Run, params: PyTree[Array]) -> dict[str, Array]:
    arrays = {name: array for name, array in params.items() if name not in _FOLDED}
    block = TransformerBlock(run.model, cross_attends=run.kind == "recurrent" or run.model.feedback)
    call = partial(block.apply, {"params": params})
    arrays["scale"] = call(method="query_scale")
    if block.cross_attends:
        arrays["cross_scale"] = call("cross_scale", method="query_scale")
    if (bias := call(method="bias")) is not None:
        arrays["bias"] = bias
    return arrays


def _cell(model: Model, params: PyTree[Array]) -> dict[str, Array]:
    weights: Any = StateCell(model).apply({"params": params}, method=lambda cell: cell.weights)
    arrays = {"cell.initial": params["initial"]}
    for name, value in weights._asdict().items():
        parts = value._asdict() if isinstance(value, GateWeights) else {"": value}
        for part, array in parts.items():
            if array is not None:
                arrays[f"cell.{name}.{part}".removesuffix(".")] = array
    return arrays
