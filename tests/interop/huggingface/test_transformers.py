"""Compares converted models of every architecture with the transformers library, in both
directions, where the library is installed.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brt.interop.huggingface import convert, verify
from brt.interop.huggingface.convert import load_converted

SIZES = {
    "vocab_size": 40, "d_model": 24, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 3,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": 40, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20, "max_position_embeddings": 80, "init_std": 0.3,
}  # fmt: skip
ROBERTA = {
    "vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 20, "max_position_embeddings": 66, "initializer_range": 0.3,
    "type_vocab_size": 1, "pad_token_id": 1,
}  # fmt: skip
LIVE = {
    "t5": ("T5ForConditionalGeneration", SIZES),
    "t5 gated": (
        "T5ForConditionalGeneration",
        {**SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "longt5 local": (
        "LongT5ForConditionalGeneration",
        {**SIZES, "encoder_attention_type": "local", "local_radius": 9},
    ),
    "longt5 global": (
        "LongT5ForConditionalGeneration",
        {
            **SIZES, "encoder_attention_type": "transient-global", "local_radius": 9,
            "global_block_size": 8, "feed_forward_proj": "gated-gelu",
        },
    ),
    "bart": ("BartForConditionalGeneration", BART),
    "roberta": ("RobertaForMaskedLM", ROBERTA),
    "roberta, 3 classes": ("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 3}),
    "roberta, spans": ("RobertaForQuestionAnswering", ROBERTA),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Torch and transformers themselves cause warnings.
@pytest.mark.parametrize("model", LIVE)
def test_converted_models_have_the_logits_of_transformers_in_both_directions(
    model: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind, settings = LIVE[model]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind.partition('For')[0]}Config")(**settings)
    theirs: Any = getattr(transformers, kind)(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.save_pretrained(tmp_path / "theirs")
        lines = list(convert.from_hf(tmp_path / "theirs", tmp_path / "ours", verified=True))
        loaded = load_converted(tmp_path / "ours")
        lines += convert.to_hf(loaded, tmp_path / "again", verified=True)
        assert sum(line.startswith("logits against transformers: largest") for line in lines) == 2
        params, described = loaded.model
        x = described.inputs()
        found = described.logits(params, x)
        reference = verify.transformers_logits(tmp_path / "again", described, x)
    np.testing.assert_allclose(found, reference, atol=1e-5 * np.abs(reference).max())
