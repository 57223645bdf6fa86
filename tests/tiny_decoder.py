"""Writes a tiny Llama with random weights in the format of Hugging Face, for tests."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from brt.config import Model
from brt.config.model import MLP, Embedding, Norm, Rotary, SelfAttention
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import config, weights
from brt.models.decoder import Decoder, new_state

TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom.\n" * 40
MODEL = Model(
    layers=3, model_dim=32, heads=4, head_dim=8, mlp_dim=48, activation="silu", window=64,
    positions="rotary", attention=SelfAttention(kv_heads=2, normalize_qk=False),
    mlp=MLP(gated=True), embedding=Embedding(logit_scale="one"),
    rotary=Rotary(base=10_000.0, context=64), norm=Norm(epsilon=1e-5),
    vocab_size=300, end_ids=(2,), dtype="float32",
)  # fmt: skip


def write_decoder(place: Path) -> None:
    """Writes a decoder, whose tokenizer splits numbers into digits first, as that of SmolLM2 does.

    Args:
      place: the directory, which must not exist.
    """
    place.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(place / "tokenizer.json"))
    start = jnp.ones((1, 1), bool)
    params = jax.jit(Decoder(MODEL).init)(
        jax.random.key(0), jnp.zeros((1, 64), jnp.int32), new_state(MODEL, 1), start
    )
    arrays = jax.tree.map(np.asarray, nn.meta.unbox(params)["params"])
    files.write_tensors(place, dict(weights.export_arrays(arrays, MODEL)), shard_bytes=20_000)
    files.write_json(place / "config.json", config.to_theirs(MODEL, 1, "llama"))


def write_chain(place: Path, follows: Mapping[str, str], end_ids: tuple[int, ...] = (2,)) -> None:
    """Writes a decoder whose text depends on the last token alone.

    Args:
      place: the directory, which must not exist.
      follows: the token that follows a token with a probability of almost 1, by their names in
        tokenizer.json. The token that follows "" follows all tokens that are not named.
      end_ids: the ids that end a text.
    """
    write_decoder(place)
    model = dataclasses.replace(
        MODEL, end_ids=end_ids, embedding=dataclasses.replace(MODEL.embedding, tied=False)
    )
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    arrays = files.read_tensors(place)
    for name in [name for name in arrays if "o_proj" in name or "down_proj" in name]:
        arrays[name] = np.zeros_like(arrays[name])
    embedding, head = np.zeros((2, *arrays["model.embed_tokens.weight"].shape), np.float32)
    embedding[:, 0] = 1
    for axis, (token, after) in enumerate(sorted(follows.items())):
        if token:
            embedding[tokenizer.token_to_id(token)] = np.eye(len(embedding[0]))[axis]
        head[tokenizer.token_to_id(after), axis] = 5
    arrays |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    arrays["model.norm.weight"] = np.ones_like(arrays["model.norm.weight"])
    for file in [*place.glob("*.safetensors*")]:
        file.unlink()
    files.write_tensors(place, arrays)
    files.write_json(place / "config.json", config.to_theirs(model, 1, "llama"))
