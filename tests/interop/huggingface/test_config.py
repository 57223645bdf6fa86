import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from brt.config import CrossAttention
from brt.errors import CheckpointError, ConfigError
from brt.interop.huggingface import files
from brt.interop.huggingface.encoder_decoder import EncoderDecoder
from brt.models.seq2seq import SpecialTokens

# Like the file on the Hugging Face hub, with settings of generation and task_specific_params.
BART_BASE = {
    "model_type": "bart", "vocab_size": 50265, "d_model": 768, "encoder_layers": 6,
    "decoder_layers": 6, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "max_position_embeddings": 1024,
    "activation_function": "gelu", "activation_dropout": 0.1, "attention_dropout": 0.1,
    "dropout": 0.1, "scale_embedding": False, "normalize_before": False,
    "add_final_layer_norm": False, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2,
    "num_beams": 4, "no_repeat_ngram_size": 3, "early_stopping": True,
    "task_specific_params": {
        "summarization_cnn": {
            "length_penalty": 2.0, "max_length": 142, "min_length": 56, "num_beams": 4,
        },
    },
}  # fmt: skip
T5_SMALL = {
    "model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048,
    "num_heads": 8, "num_layers": 6, "relative_attention_num_buckets": 32, "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-06, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def theirs(settings: dict[str, Any], tied: bool = True, **changes: Any) -> EncoderDecoder:
    """Reads changed settings of Hugging Face; `tied` says whether embeddings are tied."""
    names = () if tied else ("lm_head.weight",)
    return EncoderDecoder.from_theirs({**settings, **changes}, {}, names)


def test_bart_base_is_read_with_its_generation() -> None:
    found = theirs(BART_BASE)
    model = found.model
    assert (model.family, model.model_dim, model.heads, model.head_dim) == ("bart", 768, 12, 64)
    assert (model.activation, model.norm_epsilon, model.max_positions) == ("gelu", 1e-5, 1024)
    assert found.special == SpecialTokens(1, 2, 2, bos=0, forced_bos=0, forced_eos=2)
    assert found.generation == {"num_beams": 4, "early_stopping": True, "no_repeat_ngram_size": 3}
    assert found.tasks == BART_BASE["task_specific_params"]


def test_generation_config_beats_config() -> None:
    found = EncoderDecoder.from_theirs(BART_BASE, {"num_beams": 2, "early_stopping": None}, ())
    assert (found.generation["num_beams"], found.generation["early_stopping"]) == (2, True)


@pytest.mark.parametrize(
    ("changes", "scaled"),
    [
        ({}, True),
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, True),
    ],
)
def test_scaling_of_logits_is_read_as_transformers_reads_it(changes: dict, scaled: bool) -> None:
    for tied in (True, False):
        model = theirs(T5_SMALL, tied, **changes).model
        assert (model.scale_logits, model.tied_logits) == (scaled, tied)


def test_a_silent_config_takes_their_defaults() -> None:
    model = theirs(T5_SMALL).model
    assert (model.decoder_layers, model.activation, model.relative_max_distance) == (6, "relu", 128)
    longt5 = theirs({**T5_SMALL, "model_type": "longt5"}).model
    assert (longt5.encoder_attention, longt5.encoder_radius, longt5.global_block) == (
        "sliding", 127, 16,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "changes", "sentence"),
    [
        (T5_SMALL, {"model_type": "pegasus"}, "= 'pegasus' cannot be read; brt reads t5,"),
        (
            T5_SMALL,
            {"model_type": "deepseek", "num_experts": 8, "n_shared_experts": 1},
            r"'deepseek' cannot be read: brt lacks shared experts \(n_shared_experts\); brt reads ",
        ),
        (T5_SMALL, {"feed_forward_proj": "gated-silu"}, "'gated-silu' is not supported; .*relu"),
        (T5_SMALL, {"eos_token_id": [1, 2]}, r"eos_token_id = \[1, 2\] must be one id"),
        (BART_BASE, {"scale_embedding": True}, "sets scale_embedding"),
        (T5_SMALL, {"d_model": "8"}, "config.json: d_model cannot be used: .*8' must be an int"),
        (T5_SMALL, {"d_model": None}, "config.json has no 'd_model'"),
        (T5_SMALL, {"d_ff": 1.5}, "d_ff cannot be used"),
        (T5_SMALL, {"vocab_size": 10**22}, "vocab_size cannot be used: .* is more than 64 bits"),
        (T5_SMALL, {"task_specific_params": [1]}, "task_specific_params is .1., which is no dict"),
        (T5_SMALL, {"pad_token_id": "0"}, "pad_token_id = '0' must be one id"),
        (T5_SMALL, {"feed_forward_proj": ["relu"]}, "= .'relu'. is not supported"),
        (BART_BASE, {"decoder_ffn_dim": 64}, "encoder_ffn_dim = 3072 and decoder_ffn_dim = 64"),
        (T5_SMALL, {"num_layers": 10**9}, "encoder_layers = 1000000000 must be at most 1,024"),
        (T5_SMALL, {"vocab_size": 10**12}, "Model.vocab_size = 1000000000000 must be at most 21"),
        (T5_SMALL, {"relative_attention_num_buckets": 0}, "_buckets = 0 must be at least 4"),
        (BART_BASE, {"encoder_attention_heads": 0, "decoder_attention_heads": 0}, "heads = 0 must"),
    ],
)
def test_settings_that_brt_lacks_are_refused(settings: dict, changes: dict, sentence: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=sentence):
        theirs(settings, **changes)


def test_what_is_written_is_read_again(read: Callable, directory: Callable, name: str) -> None:
    cross = CrossAttention(kind="srformer", segment_size=4, as_authors=True)
    described = read(name)[0].described._replace(cross=cross)
    settings, generation = described.to_theirs().values()
    names = () if described.model.tied_logits else ("lm_head.weight",)
    assert EncoderDecoder.from_theirs(settings, generation, names) == described
    saved = files.read_json(directory(name) / "config.json")
    assert {k: v for k, v in settings.items() if k in saved and v != saved[k]} == {}


def test_a_windowed_bart_cannot_be_written(read: Callable) -> None:
    described = read("bart")[0].described
    windowed = dataclasses.replace(described.model, encoder_attention="sliding")
    with pytest.raises(CheckpointError, match="'sliding' has no counterpart"):
        described._replace(model=windowed).to_theirs()
