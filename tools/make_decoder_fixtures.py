"""Writes tests/data/decoders: tiny random decoders of each family, and the logits that the library
transformers computes with them. Tests compare brt's logits with them.

    pip install torch transformers
    python tools/make_decoder_fixtures.py tests/data/decoders

All weights are random, including the scales of norms (1 in a new model) and biases (0 in a new
model). The weights are rounded to float16, because the files contain float16. The documents are
longer than four windows, and longer than the models' original contexts, so that the scaling of
rotary positions matters.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

TOKENS, VOCABULARY = 64, 96
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TOKENS,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama3_scaling": ("Llama", {"rope_scaling": LLAMA3}),
    "linear_scaling": ("Llama", {"rope_scaling": LINEAR}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "layer_types": LAYERS},
    ),
}


def main(directory: Path) -> None:
    """Writes a file with config, weights, token ids and logits for each case."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, (family, settings) in CASES.items():
        config_class = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
        config = getattr(transformers, config_class)(**SIZES, **settings)
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.15)
                parameter.copy_(parameter.half().float())
        ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0].numpy()
        saved = model.state_dict()
        if config.tie_word_embeddings:
            saved = {k: v for k, v in saved.items() if k != "lm_head.weight"}
        arrays = {k: v.half().numpy() for k, v in saved.items()}
        np.savez_compressed(
            directory / f"{name}.npz", config=config.to_json_string(), ids=ids[0].numpy(),
            logits=logits, **arrays,
        )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
