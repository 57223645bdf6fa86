"""Tests decoders of Hugging Face: logits equal those of transformers, and exports are bit-equal.

tests/data/decoders has a tiny random model of each family, made by tools/make_decoder_fixtures.py.
Each document is longer than four windows, and longer than the context before the scaling of rotary
positions.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Model
from brt.errors import CheckpointError, ConfigError
from brt.interop.huggingface.causal import config, families, rotary, weights
from brt.interop.huggingface.causal.config import WindowChoice
from brt.models.decoder import Decoder, logits, new_state, output_weights

DATA = Path(__file__).parents[2] / "data" / "decoders"
FAMILIES = sorted(path.stem for path in DATA.glob("*.npz"))
TOLERANCE = 1e-5  # of float32 logits, relative to the largest logit


class Case(NamedTuple):
    """A Hugging Face config, its weights, and the recorded logits of a document."""

    described: dict[str, Any]
    arrays: dict[str, np.ndarray]
    ids: np.ndarray
    logits: np.ndarray


def case(family: str) -> Case:
    """Returns the recorded config, weights, token ids and logits of a model family."""
    with np.load(DATA / f"{family}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    described = json.loads(str(arrays.pop("config")))
    ids, expected = arrays.pop("ids").astype(np.int32), arrays.pop("logits")
    return Case(described, arrays, ids, expected)


def model_of(described: dict[str, Any]) -> Model:
    """Returns the float32 model for a Hugging Face config, with blocks of 8 tokens unless positions
    are learned.
    """
    model = config.read(described, WindowChoice(sinks=0))[0]
    blocks = {} if model.positions == "learned" else {"Window.block": 8}
    return with_settings(model, {"dtype": "float32", **blocks})


def params_of(described: dict[str, Any], arrays: dict[str, np.ndarray], model: Model) -> Any:
    """Returns the parameters of brt's decoder from arrays by the names of their family."""
    family = families.FAMILIES[described["model_type"]]
    plain = weights.plain_names(arrays, family)
    named = families.llama_arrays(plain, family, model.heads, model.key_heads)
    return weights.import_arrays(named, model)


def read(model: Model, params: Any, ids: np.ndarray, cuts: tuple[int, ...] = ()) -> np.ndarray:
    """Returns the logits of a document that is read in segments with ends at `cuts`."""
    state, pieces = new_state(model, 1), []
    call = jax.jit(Decoder(model).apply)
    for begin, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        start = np.zeros((1, (end - begin) // model.block_length), bool)
        start[0, 0] = begin == 0
        output = call({"params": params}, ids[None, begin:end], state, start)
        state = output.state
        pieces.append(logits(model, output_weights(model, params), output.hidden)[0])
    return np.concatenate(pieces)


def assert_equal_logits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.slow_cases(
    "llama_biases",
    "linear_scaling",
    "mistral",
    "yarn_scaling",
    "gemma",
    "smollm3",
    "granite",
    "olmo2",
    "pythia_in_sequence",
    "gemma2",
    "mixtral",
    "olmo3",
    "gpt_oss",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    described, arrays, ids, expected = case(family)
    model = model_of(described)
    params = params_of(described, arrays, model)
    assert_equal_logits(read(model, params, ids), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"gpt2", "phi3"}))
def test_a_window_and_sinks_are_the_definition_in_attention_of_transformers(family: str) -> None:
    described, arrays, ids, _ = case(family)
    choice = WindowChoice() if family == "mistral" else WindowChoice(8, 2)
    model = with_settings(config.read(described, choice)[0], {"dtype": "float32"})
    with np.load(DATA / "windows/logits.npz") as file:
        expected = file[family]
    found = read(model, params_of(described, arrays, model), ids)
    assert_equal_logits(found[-len(expected) :], expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_segments_and_token_by_token(family: str) -> None:
    described, arrays, ids, expected = case(family)
    model = model_of(described)
    params = params_of(described, arrays, model)
    cuts = (8, 40) if model.block_length == 8 else ()
    assert_equal_logits(read(model, params, ids, cuts), expected)
    decoder, variables = Decoder(model), {"params": params}
    step = jax.jit(lambda *inputs: decoder.apply(*inputs, method=Decoder.decode_step))
    state, rows = new_state(model, 1), []
    for i, token in enumerate(ids):
        place = i % model.block_length
        if place == 0:
            block = decoder.apply(variables, state, method=Decoder.begin_block)
        row, block = step(variables, jnp.asarray([token]), state, block, jnp.asarray([place]))
        rows.append(row[0])
        if place == model.block_length - 1:
            state = decoder.apply(variables, state, block, method=Decoder.end_block)
    assert_equal_logits(np.stack(rows), expected)


@pytest.mark.slow_cases("gemma", "gemma2", "smollm3", "olmo3", "llama_biases", "mixtral")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_way_back_is_bit_equal(family: str) -> None:
    described, arrays, *_ = case(family)
    model = config.read(described, WindowChoice(sinks=0))[0]
    kind = described["model_type"]
    params = params_of(described, arrays, model)
    plain = dict(weights.export_arrays(params, model))
    exported = families.own_arrays(plain, families.FAMILIES[kind], model.heads)
    head = "lm_head.weight"  # Files of GPT-NeoX call it `embed_out`.
    arrays = {
        "embed_out.weight" if kind == "gpt_neox" and n == head else n: x for n, x in arrays.items()
    }
    assert exported.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(exported[name], array.astype(np.float32))
    assert config.family_of(model, kind) == kind
    again = config.to_theirs(model, 1, kind)
    assert config.read(again, WindowChoice(sinks=0))[0] == model


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_decoder_of_a_model_of_texts_and_images_is_read(prefix: str) -> None:
    described, arrays, *_ = case("gemma3")
    both = {"model_type": "gemma3", "text_config": described, "vision_config": {"hidden_size": 8}}
    named = {f"{prefix}{name.removeprefix('model.')}": x for name, x in arrays.items()}
    named["model.vision_tower.patch.weight"] = np.zeros((2, 2))
    assert config.read(both, WindowChoice(sinks=0)) == config.read(described, WindowChoice(sinks=0))
    family = families.FAMILIES[config.text_part(both)["model_type"]]
    plain = weights.plain_names(named, family)
    assert plain.keys() == arrays.keys()


@pytest.mark.parametrize(("window", "expected"), [(8, (1.0, 1.5, 2.0)), (32, (1.2, 2.0, 4.0))])
def test_the_window_chooses_the_divisors_of_longrope(window: int, expected: tuple) -> None:
    described = case("phi3").described
    described["rope_parameters"]["original_max_position_embeddings"] = 16
    model = config.read(described, WindowChoice(window, 0))[0]
    assert (model.rotary.divisors, model.rotary.channels) == (expected, 6)
    assert rotary.notes(described)


def test_configs_of_earlier_transformers_say_the_same() -> None:
    described = case("llama3_scaling").described
    scaling = described.pop("rope_parameters")
    scaling["low_freq_factor"] = int(scaling["low_freq_factor"])  # Some files have 1, not 1.0.
    older = {**described, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    newer = {**described, "rope_parameters": {**scaling, "rope_theta": older["rope_theta"]}}
    assert model_of(older) == model_of(newer)
    gemma = case("gemma3").described
    both = gemma.pop("rope_parameters")
    older = {
        **gemma,
        "rope_theta": both["full_attention"]["rope_theta"],
        "rope_local_base_freq": both["sliding_attention"]["rope_theta"],
    }
    assert model_of(older) == model_of({**gemma, "rope_parameters": both})


def test_experts_have_other_keys_in_files_of_the_hub() -> None:
    newer = case("qwen3_moe").described
    older = {("num_experts" if k == "num_local_experts" else k): x for k, x in newer.items()}
    assert model_of(older) == model_of(newer)
    assert model_of(newer).mlp.experts == 5
    for changes in ({"num_experts_per_tok": 6}, {"num_local_experts": 10**12}):
        with pytest.raises(ConfigError, match=r"MLP\.experts = .* must be "):
            config.read(newer | changes, WindowChoice())


def test_scaling_of_gemma_is_for_layers_without_a_window() -> None:
    described = case("gemma3").described
    described["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    model = model_of(described)
    local, without_window = model.for_layer(0).rotary, model.for_layer(1).rotary
    assert (local.base, local.divisors) == (10_000.0, ())
    assert without_window.divisors == (8.0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba' is none of the decoders"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 asks for"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 asks for soft caps"),
        ({"hidden_act": "relu2"}, "hidden_act = 'relu2' is not supported"),
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope scaling 'ntk' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor = 0 must be above 0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}, "rope_theta": 1.0},
            "'yarn' cannot be computed from a base of 1.0",
        ),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "interval = 0 must be above 0"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' lacks 'factor'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"hidden_size": "32"}, "hidden_size is '32', which is no int"),
        ({"num_attention_heads": None}, "has no 'num_attention_heads'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"num_local_experts": 8}, "num_local_experts = 8 asks for experts of this kind"),
        ({"model_type": "mixtral", "n_shared_experts": 1}, "= 1 asks for shared experts"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not"),
    ],
)
def test_a_config_that_brt_cannot_compute_is_refused(change: dict[str, Any], message: str) -> None:
    described = {**case("llama").described, "rope_parameters": None, **change}
    with pytest.raises(CheckpointError, match=message):
        config.read(described, WindowChoice())


def test_arrays_without_a_place_or_missing_are_refused() -> None:
    described, arrays, *_ = case("llama")
    model = config.read(described, WindowChoice())[0]
    with pytest.raises(CheckpointError, match=r"q_proj\.bias, which have no place"):
        weights.import_arrays(
            {**arrays, "model.layers.0.self_attn.q_proj.bias": np.zeros(32)}, model
        )
    left = {name: x for name, x in arrays.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        weights.import_arrays(left, model)
    cut = {**arrays, "model.norm.weight": np.zeros(31)}
    with pytest.raises(CheckpointError, match=r"norm\.weight is \(31,\), not \(32,\)"):
        weights.import_arrays(cut, model)


def test_windows_and_sinks_that_the_user_asks_for() -> None:
    llama, mistral = case("llama").described, case("mistral").described
    model = config.read(llama, WindowChoice())[0]
    assert (model.window, model.sliding.sinks) == (64, 4)
    assert config.read(llama, WindowChoice(32, 0))[0].sliding.sinks == 0
    assert config.read(mistral, WindowChoice())[0].sliding.sinks == 0
    assert config.read(mistral, WindowChoice(6))[0].sliding.sinks == 4


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_of_qwen_have_a_window_only_if_the_config_uses_it(family: str) -> None:
    theirs = {**case(family).described, "num_hidden_layers": 3, "layer_types": None}
    theirs = {name: value for name, value in theirs.items() if value is not None}

    def windows(**keys: Any) -> tuple[int, ...]:
        return config.read(theirs | keys, WindowChoice(16))[0].sliding.by_layer

    windowed = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    theirs = {name: value for name, value in theirs.items() if name not in windowed}
    assert windows() == windows(sliding_window=8) == ()
    assert windows(**windowed) == (0, 8, 8)
    assert windows(**windowed, layer_types=["full_attention"] * 2 + ["sliding_attention"]) == (
        0, 0, 8,
    )  # fmt: skip
    # The first 28 layers attend to everything if the config does not say otherwise.
    assert windows(use_sliding_window=True) == ()
    model = config.read(theirs | windowed | {"max_window_layers": 0}, WindowChoice())[0]
    assert (model.window, model.sliding.sinks, model.sliding.by_layer) == (8, 0, ())


def test_missing_windows_are_those_of_transformers() -> None:
    mistral, gemma = dict(case("mistral").described), dict(case("gemma3").described)
    del mistral["sliding_window"]
    assert config.read(mistral, WindowChoice())[0].window == 4096
    without = config.read(mistral | {"sliding_window": None}, WindowChoice())[0]
    assert without.sliding.sinks == 4
    for name in ("layer_types", "sliding_window_pattern", "_sliding_window_pattern"):
        gemma.pop(name, None)
    layers = gemma["num_hidden_layers"] = 7
    model = config.read(gemma, WindowChoice())[0]
    own = gemma["sliding_window"]
    assert model.sliding.by_layer == tuple(0 if i == 5 else own for i in range(layers))
