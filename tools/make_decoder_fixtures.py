"""Writes tests/data/decoders: tiny random decoders of each family, and the logits that the library
transformers computes with them. Tests compare brt's logits with them.

windows/logits.npz has the last logits of the same documents if the layers without a window of their
own see `WINDOW` tokens and `SINKS` sinks. For it, `Windowed` takes the place of transformers'
attention.

    pip install torch transformers
    python tools/make_decoder_fixtures.py tests/data/decoders

All weights are random, including the scales of norms (1 in a new model) and biases (0 in a new
model). The weights are rounded to float16, because the files contain float16. The documents are
longer than four windows, and longer than the models' original contexts, so that the scaling of
rotary positions matters.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

TOKENS, VOCABULARY = 64, 96
WINDOW, SINKS, LAST = 8, 2, 16
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
    "mixtral": ("Mixtral", {"num_local_experts": 3, "intermediate_size": 24}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16},
    ),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
            "intermediate_size": 24, "swiglu_limit": 1.0, "layer_types": LAYERS,
            "rope_scaling": {**YARN, "truncate": False}},
    ),
}  # fmt: skip


class Windowed:
    """Attention to a window and sinks, for transformers' interface of attention.

    In the layers without a window of their own, the queries that read sinks outside the window are
    rotated again, so that token p is at min(p, WINDOW + SINKS - 1). In layers without rotary
    positions, they are not.
    """

    def __init__(self, model: torch.nn.Module):
        rotary = next(m for n, m in model.named_modules() if n.endswith("rotary_emb"))
        positions = torch.arange(TOKENS)
        turns = positions.clamp(max=WINDOW + SINKS - 1) - positions
        # Of models with two kinds of rotary positions, the layers without a window have this one.
        options = {"layer_type": FULL} if hasattr(rotary, f"{FULL}_inv_freq") else {}
        cos, sin = rotary(torch.zeros(()), turns[None], **options)
        if cos.shape[-1] == len(getattr(rotary, "inv_freq", ())):  # That of gpt-oss has one half.
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        factor = torch.sqrt(cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2)
        self.cos, self.sin = cos[0] / factor, sin[0] / factor

    def __call__(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        mask: torch.Tensor | None, scaling: float, softcap: float | None = None,
        sliding_window: int | None = None, s_aux: torch.Tensor | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        row, column = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
        near = (column <= row) & (row - column < (sliding_window or WINDOW))
        sinks = (column < SINKS) & (column <= row) & ~near & (sliding_window is None)
        turned = query if not getattr(module, "use_rope", True) else self._turned(query)
        products = torch.where(near, query @ key.mT, turned @ key.mT) * scaling
        if softcap is not None:
            products = softcap * torch.tanh(products / softcap)
        products = products.masked_fill(~(near | sinks), -torch.inf)
        if s_aux is not None:  # The logits of gpt-oss without a value.
            products = torch.cat((products, s_aux[:, None, None].expand(1, -1, TOKENS, 1)), -1)
        weights = torch.softmax(products, -1)[..., :TOKENS]
        return (weights @ value).transpose(1, 2).contiguous(), None

    def _turned(self, query: torch.Tensor) -> torch.Tensor:
        turned, rest = query[..., : self.cos.shape[-1]], query[..., self.cos.shape[-1] :]
        first, second = turned.chunk(2, -1)
        turned = turned * self.cos + torch.cat((-second, first), -1) * self.sin
        return torch.cat((turned, rest), -1)


def main(directory: Path) -> None:
    """Writes a file with config, weights, token ids and logits for each case."""
    (directory / "windows").mkdir(parents=True, exist_ok=True)
    windowed = {}
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
            # The divisors of longrope depend on the length that is read.
            if name not in ("gpt2", "phi3"):
                transformers.AttentionInterface.register("windowed", Windowed(model))
                model.set_attn_implementation("windowed")
                seen = model(input_ids=ids, use_cache=False).logits[0].numpy()
                windowed[name] = seen[-LAST:]
        with tempfile.TemporaryDirectory() as place:
            model.save_pretrained(place)
            saved = load_file(f"{place}/model.safetensors")
        arrays = {k: v.half().numpy() for k, v in saved.items()}
        np.savez_compressed(
            directory / f"{name}.npz", config=config.to_json_string(), ids=ids[0].numpy(),
            logits=logits, **arrays,
        )  # fmt: skip
    np.savez_compressed(directory / "windows/logits.npz", **windowed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
