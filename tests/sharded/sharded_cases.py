"""Tiny runs of every task and every kind of layer.

Eight devices can divide the arrays along any axis of a mesh.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import numpy as np
from model_settings import changed, with_settings

from brt.config import (
    Attention,
    Config,
    CrossAttention,
    Data,
    Encoder,
    Mesh,
    Model,
    Optimizer,
    Pairs,
    Questions,
    Sentences,
    Seq2Seq,
    Speech,
    Training,
)
from brt.layers.sections import Clustered, Recurrence
from brt.memories import DenseMemory, Memorizing, Summaries
from brt.training import optimizer as optimizers
from brt.training import run as runs

STEPS = 12
WORDS = "fünf Füchse laufen über den kalten See und ruhen dann am Ufer aus".split()
MODEL = Model(
    layers=2,
    model_dim=16,
    heads=8,
    head_dim=4,
    mlp_dim=32,
    window=4,
    dtype="float32",
    kinds=(
        Recurrence(states=4),
        Memorizing(size=64, neighbors=4),
        DenseMemory(size=64),
        Clustered(clusters=3, top_k=2),
        Summaries(summaries=2, short_memory=2, long_memory=8, long_increment=2),
    ),
)
ENCODER = Encoder(
    layers=2, model_dim=32, heads=8, mlp_dim=32, dropout=0.0, positions="sinusoidal",
    dtype="float32",
)  # fmt: skip
SEQ2SEQ = Seq2Seq(
    encoder_layers=2, decoder_layers=2, model_dim=16, heads=8, head_dim=4, mlp_dim=32, dropout=0.0,
    dtype="float32",
)  # fmt: skip

GROUPED = {
    "heads": 8, "SelfAttention.kv_heads": 2, "head_dim": 4, "positions": "rotary",
    "MLP.gated": True, "activation": "silu", "SelfAttention.normalize_qk": False, "Window.sinks": 2,
    "Embedding.tied": False, "Embedding.logit_scale": "one", "Norm.queries_keys": "head",
}  # fmt: skip

MESHES = {
    "data": Mesh(data=8),
    "fsdp": Mesh(fsdp=8),
    "tensor": Mesh(tensor=8),
    "sequence": Mesh(sequence=8),
    "data_fsdp_tensor": Mesh(data=2, fsdp=2, tensor=2),
    "data_sequence": Mesh(data=2, sequence=4),
}


def text(seed: int, words: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def _lines(place: Path, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Writes rows to a JSON Lines file, and returns its path in a tuple."""
    (place / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (str(place / "a.jsonl"),)


def documents(place: Path, model: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Returns a config with documents of several segments and of less than one segment."""
    rows = [{"text": text(i, words)} for i, words in enumerate((90, 3, 150, 40, 7, 70, 120, 60))]
    return Config(
        model=with_settings(MODEL, model),
        data=Data(train=_lines(place, rows), validation_fraction=0.0, test_fraction=0.0,
                  cache_dir=str(place / "cache")),
        training=Training(segment_length=32, batch_size=8, loss_chunk=8),
    )  # fmt: skip


def masked(place: Path, **attention: Any) -> Config:
    data = documents(place).data
    training = Training(task="masked_language_modeling", segment_length=32, batch_size=8)
    return Config(
        data=data, encoder=ENCODER, attention=Attention(**attention), training=training,
    )  # fmt: skip


def shared(config: Config) -> Config:
    """Returns the config with one projection for queries and keys."""
    return changed(config, encoder={"shared_queries_keys": True})


def pairs(place: Path, cross: CrossAttention | None = None, **seq2seq: Any) -> Config:
    rows = [
        {"id": str(i), "document": text(i, 30 - i), "summary": text(i + 9, 5 + i % 3)}
        for i in range(16)
    ]
    section = Pairs(
        train=_lines(place, rows), validation=(), test=(), tokenizer="train:290",
        max_source_length=32, max_target_length=16, cache_dir=str(place / "cache"),
    )  # fmt: skip
    return Config(
        seq2seq=dataclasses.replace(SEQ2SEQ, **seq2seq), pairs=section,
        cross_attention=cross or CrossAttention(),
        training=Training(task="summarization", batch_size=8),
    )  # fmt: skip


def sentences(place: Path, task: str = "text_classification") -> Config:
    rows = [{"sentence": text(i, 3 + i % 5), "label": i % 2} for i in range(16)]
    section = Sentences(
        train=_lines(place, rows), validation=(), test=(), max_length=64, buckets=(32, 64),
        cache_dir=str(place / "cache"),
    )  # fmt: skip
    training = Training(task=task, batch_size=8)
    return Config(encoder=ENCODER, sentences=section, training=training)


def questions(place: Path) -> Config:
    paragraphs = []
    for i in range(16):
        context = text(i, 6 + i)
        answer = {"text": context.split()[1], "answer_start": len(context.split()[0]) + 1}
        asked = [{"id": str(i), "question": text(i + 5, 4), "answers": [answer]}]
        paragraphs.append({"context": context, "qas": asked})
    (place / "a.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    section = Questions(
        train=(str(place / "a.json"),), validation=(), test=(), max_length=112, stride=16,
        max_question_length=24, cache_dir=str(place / "cache"),
    )  # fmt: skip
    training = Training(task="extractive_qa", batch_size=8)
    return Config(encoder=ENCODER, questions=section, training=training)


def speech(place: Path) -> Config:
    lengths = [24 + 2 * i for i in range(16)]
    features = np.random.default_rng(0).normal(size=(sum(lengths), 4))
    np.savez(
        place / "a.npz", features=features, lengths=lengths, ids=[str(i) for i in range(16)],
        transcripts=[WORDS[i % len(WORDS)] for i in range(16)],
    )  # fmt: skip
    section = Speech(
        train=(str(place / "a.npz"),), validation=(), test=(), cache_dir=str(place / "cache")
    )
    training = Training(task="speech_recognition", batch_size=8)
    return Config(encoder=ENCODER, speech=section, training=training)


RECURRENT = {"Recurrence.layers": (1,)}
DECODERS: dict[str, dict[str, Any]] = {
    "window": {},
    "recurrent": RECURRENT,
    "recurrent_dual": RECURRENT
    | {"Recurrence.gate": "lstm", "Recurrence.gate_layout": "dual", "positions": "rotary"},
    "recurrent_single": RECURRENT
    | {"Recurrence.gate": "gru", "Recurrence.gate_layout": "single", "positions": "alibi"},
    "feedback": RECURRENT | {"layers": 3, "feedback": True},
    # Settings of pretrained decoders. 8 devices cannot divide 2 heads of keys, so keys are
    # replicated.
    "grouped": GROUPED,
    "grouped_recurrent": GROUPED | RECURRENT,
    "grouped_memorizing": GROUPED | {"Memorizing.layers": (1,), "Memorizing.gate": "tanh"},
    "grouped_dense_memory": GROUPED | {"DenseMemory.layers": (1,), "DenseMemory.gate": "tanh"},
    "memorizing": {"Memorizing.layers": (1,)},
    "clustered": {"Clustered.layers": (0,)},
    "compressive": {"Compressive.layers": (0,), "Compressive.slots": 8},
    "dense_memory": {"DenseMemory.layers": (1,)},
    "routing": {"Routing.layers": (0,), "Routing.clusters": 4, "Routing.keep": 8},
    "rg_lru": {"RGLRU.layers": (0,)},
    "gated_delta_net": {"GatedDeltaNet.layers": (0,), "GatedDeltaNet.window_layers": (1,)},
    "summary": {"Summaries.layers": (0,), "Summaries.long_layers": (1,)},
}
CASES: dict[str, Callable[[Path], Config]] = {
    **{name: partial(documents, model=model) for name, model in DECODERS.items()},
    "masked": masked,
    "masked_clustered": partial(masked, kind="improved_clustered", clusters=4, top_k=4),
    "masked_reformer": lambda place: shared(masked(place, kind="reformer", chunk=4, buckets=4)),
    "t5": pairs,
    "t5_dropout": partial(pairs, dropout=0.2, attention_dropout=0.2),
    "bart_raf": partial(
        pairs, cross=CrossAttention(kind="srformer", segment_size=8, q_ref=16), family="bart",
        activation="gelu",
    ),
    "long_t5": partial(
        pairs, encoder_attention="transient_global", encoder_radius=3, global_block=4,
        activation="gated_gelu",
    ),
    "classification": sentences,
    "regression": partial(sentences, task="text_regression"),
    "questions": questions,
    "speech": speech,
}  # fmt: skip


def with_optimizer(config: Config, name: str, steps: int) -> Config:
    optimizer = Optimizer(name=name, learning_rate=0.003, warmup_steps=2, clip_norm=1.0)
    return changed(config, optimizer=optimizer, training={"steps": steps})


def factored() -> Any:
    """Returns a context in which Adafactor also factors the second moments of the cases' small
    matrices.
    """
    return mock.patch.object(optimizers, "SMALLEST_FACTORED", 8)


def curve(config: Config, mesh: Mesh, steps: int) -> tuple[list[float], Any]:
    """Returns the nats of each step, and the final state on the host, which is None for several
    processes.
    """
    with factored():
        run = runs.build(changed(config, mesh=mesh), progress=False)
    state, step, nats = runs.new_state(run), runs.CompiledStep(run), []
    reader = runs.local_reader(run)
    for i in range(steps):
        state, metrics = step(state, runs.put(run, reader[i]))
        nats.append(metrics.nats)
    alone = jax.process_count() == 1
    return [float(x) for x in nats], jax.device_get(state) if alone else None


def worst(found: Any, expected: Any) -> float:
    """Returns the largest difference of two trees, relative to each array's largest magnitude."""

    def difference(a: np.ndarray, b: np.ndarray) -> float:
        most = np.max(np.abs(np.subtract(a, b, dtype=np.float64)))
        return float(most / max(np.max(np.abs(b)), 1e-6))

    both = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max((difference(a, b) for a, b in both if np.size(b)), default=0.0)
