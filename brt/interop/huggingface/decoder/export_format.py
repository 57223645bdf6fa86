"""Settings and arrays of an exported language model, as modeling_brt.py reads them, and a
comparison of that model with the original: arrays, logits of several segments, a generated text.

modeling_brt.py is the PyTorch code that is exported together with the model. In shapes of logits, B
is the number of texts, T the number of tokens of a segment, and V the size of the vocabulary.
"""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Config, Model
from brt.config_io import model_settings
from brt.errors import CheckpointError
from brt.interop.exporting import ExportFormat
from brt.interop.huggingface import files
from brt.interop.huggingface import verify as reports
from brt.interop.huggingface.causal.families import FIELDS
from brt.interop.pretrained import parameter_count
from brt.layers.attention import TransformerBlock
from brt.layers.cache import speeds_of
from brt.layers.recurrent import StateCell
from brt.layers.runs import Run, runs
from brt.layers.sections import Recurrence
from brt.layers.state import has_null_keys
from brt.memories.dense_memory import DenseMemory
from brt.memories.gated_delta_net import GatedDeltaNet
from brt.models.decoder import Decoder, logit_scale, logits, new_state, output_weights
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
# The keys are brt's names of linear maps, and the values are the names that are usual in
# transformers' models. The memory of Gated DeltaNet has the names of its authors' library.
_LINEAR = {
    "queries": "q_proj", "keys": "k_proj", "values": "v_proj", "output": "o_proj",
    "cross_queries": "cross_q_proj", "mlp_in": "up_proj", "mlp_gate": "gate_proj",
    "mlp_out": "down_proj",
}  # fmt: skip
_LINEAR_OF_MEMORY = {
    **{name: _LINEAR[name] for name in ("queries", "keys", "values", "output")},
    "gate": "g_proj", "strength": "b_proj", "step": "a_proj",
}  # fmt: skip
# The exported model reads texts of any length. config.json states this large maximum, because
# programs would divide texts that are longer than the maximum.
_LONGEST = 2**20
# These parameters of brt are not exported. The arrays `bias`, `scale` and `cross_scale`, which are
# computed from these parameters, are exported in their place.
_FOLDED = {"relative_bias", "alibi_scale", "alibi_bound", "scale", "cross_scale"}
# The comparison reads SEGMENTS segments and generates WRITTEN tokens. In a model with sinks, tokens
# attend to the sinks separately only after the sinks have left the window, so the comparison reads
# more segments than fit into the window, but at most MOST_SEGMENTS.
SEGMENTS, MOST_SEGMENTS, WRITTEN = 3, 18, 32


class TrainedDecoder(NamedTuple):
    """A trained language model that is to be exported: parameters of `brt.models.decoder.Decoder`,
    settings with the size of the vocabulary, and the id of the token that every text begins
    with.
    """

    params: PyTree[Array]
    model: Model
    bos_id: int


def to_format(trained: TrainedDecoder) -> ExportFormat:
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
    config = {"config.json": settings(trained)}
    verify = partial(compare, trained.params, model, exported)
    return ExportFormat(summary, config, exported, verify, code=CODE)


def settings(trained: TrainedDecoder) -> dict[str, Any]:
    """Returns the content of config.json. Settings that other models of transformers also have get
    the names that are usual there.
    """
    m, recurrence = trained.model, trained.model.of(Recurrence)
    by_layer, values = [m.for_layer(i) for i in range(m.layers)], model_settings(Config(model=m))
    speeds = (
        [speeds_of(own).radians if own.positions == "rotary" else () for own in by_layer]
        if m.positions == "rotary"
        else []
    )
    tables = list(dict.fromkeys(speeds))
    module = CODE[0].stem
    return {
        "architectures": ["BrtForCausalLM"],
        "model_type": "brt",
        "auto_map": {
            "AutoConfig": f"{module}.BrtConfig",
            "AutoModelForCausalLM": f"{module}.BrtForCausalLM",
        },
        **{theirs: values.get(ours) for ours, theirs in FIELDS.items()},
        "bos_token_id": trained.bos_id,
        "eos_token_id": list(m.end_ids) or None,
        "num_key_value_heads": m.key_heads,
        "hidden_act": _ACTIVATIONS.get(m.activation, m.activation),
        "gated_mlp": m.mlp.gated,
        "num_experts": m.mlp.experts,
        "num_experts_per_tok": m.mlp.experts_per_token,
        "norm_topk_prob": m.mlp.normalize_router,
        "mlp_clamp": m.mlp.clamp,
        "learned_sink": m.attention.learned_sink,
        "attention_bias": m.attention.bias,
        "norm_offset": m.norm.offset,
        "norm_kind": m.norm.kind,
        "norm_place": m.norm.place,
        "query_key_norms": m.norm.queries_keys,
        "parallel": m.parallel,
        "embedding_factor": m.embedding.factor,
        "residual_factor": m.residual_factor,
        "soft_cap": m.attention.soft_cap,
        "logit_soft_cap": m.embedding.soft_cap,
        "max_position_embeddings": _LONGEST,
        "logit_scale": logit_scale(m),
        "block": m.block_length,
        "kinds": list(m.layer_types),
        "windows": list(m.windows),
        "sinks": [own.sliding.sinks for own in by_layer],
        "rotary": [tables.index(own) for own in speeds],
        "rotary_speeds": [list(own) for own in tables],
        "rotary_factors": [own.rotary.attention_factor for own in by_layer],
        "learned_positions": m.rotary.context if m.positions == "learned" else 0,
        "position_bias": m.positions in ("t5", "alibi"),
        "attend_to_self": m.sliding.attend_to_self,
        "normalize_qk": m.attention.normalize_qk,
        "cache": m.sliding.cache,
        "null_keys": has_null_keys(m) and m.window_is_block,
        "states": recurrence.states,
        "gate": recurrence.gate,
        "gate_layout": recurrence.gate_layout,
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
    tops = {"embedding": "embed_tokens.weight", "output": "lm_head.weight"}
    for name in params.keys() - {"stack"}:
        yield f"decoder.{tops.get(name, name)}", np.asarray(params[name], np.float32)
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
    # Linear maps get the names in `names`, and the layout [out, in]. `step` becomes `a_proj`, but
    # `step_bias` keeps its name: the exported code adds it in float32, outside of the linear map.
    renamed = {}
    for name, array in arrays.items():
        kernel = name.removesuffix("_bias")
        if kernel not in names or name == "step_bias":
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


def compare(
    params: PyTree[Array], model: Model, before: Mapping[str, np.ndarray], directory: Path
) -> Iterator[str]:
    """Compares the model in an exported directory with the original, and yields lines of a report.
    Raises CheckpointError if arrays, logits or tokens differ by more than rounding can explain.
    `before` has the float32 arrays that were exported, by name.
    """
    rounding = yield from reports.compare_arrays(before, files.read_tensors(directory))
    missing = [n for n in ("torch", "safetensors") if importlib.util.find_spec(n) is None]
    if missing:
        yield "logits and text: not compared; pip install torch, and --verify compares them"
        return
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
    """Returns the float32 logits of several segments of a text. brt's model reads the segments one
    after another, and carries its state from one segment to the next. The logits are concatenated
    along the axis of tokens.
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
