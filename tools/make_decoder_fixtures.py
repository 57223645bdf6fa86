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
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    "rope_theta": 10_000.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.2, 2.0, 4.0],
    "original_max_position_embeddings": 16, "rope_theta": 10_000.0, "partial_rotary_factor": 0.75,
}  # fmt: skip
LOCAL, FULL = "sliding_attention", "full_attention"
LAYERS = [LOCAL, FULL, LOCAL]
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": TOKENS,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama3_scaling": ("Llama", {"rope_scaling": LLAMA3}),
    "linear_scaling": ("Llama", {"rope_scaling": LINEAR}),
    "yarn_scaling": ("Llama", {"rope_scaling": YARN}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "gemma": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "layer_types": LAYERS,
            "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "layer_types": LAYERS},
    ),
    "phi3": ("Phi3", {"rope_scaling": LONGROPE}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.3},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 8, "layer_types": LAYERS, "rope_scaling": YARN},
    ),
    "pythia": ("GPTNeoX", {"rotary_pct": 0.5}),
    "pythia_in_sequence": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt2": ("GPT2", {}),
}  # fmt: skip


def main(directory: Path) -> None:
    """Writes a file with config, weights, token ids and logits for each case."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, (family, settings) in CASES.items():
        config_class = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
        sizes = dict(GPT2 if family == "GPT2" else SIZES)
        if family == "GPTNeoX":
            del sizes["num_key_value_heads"]
        config = getattr(transformers, config_class)(**sizes | settings)
        torch.manual_seed(0)
        kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
        model = getattr(transformers, kind)(config).eval().float()
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
