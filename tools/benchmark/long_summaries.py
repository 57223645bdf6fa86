"""Measures milliseconds and memory of a training step of a summariser with each encoder attention.

    python tools/benchmark/long_summaries.py [--lengths=4096,16384] [--family=bart] [--rounds=5]
        [--model_dim=256] [--layers=4] [--target=128] [--clusters=100] [--top_k=32] [--json=FILE]

A step is the forward and backward pass of the loss of one random pair, with dropout and without the
optimizer. The kinds of attention take turns. `median ms` is the median over the rounds, `full / it`
the median over the rounds of the time of exact attention divided by the time of this kind. `MiB` is
the size of the temporary buffers of the step.
"""

import argparse
import statistics
import sys
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from conditions import report
from flags import parser
from timing import interleaved, ratio, show

from brt import runtime, tasks
from brt.config import Attention, Config, Pairs, Seq2Seq, Training
from brt.tasks.arguments import LossInputs
from brt.types import PairBatch

KINDS = ("full", "clustered", "improved_clustered")
VOCABULARY = 8000


def main() -> None:
    args = parser(
        __doc__, lengths=([4096, 16384], "source tokens"), family=("bart", "or t5"), rounds=5,
        model_dim=256, layers=(4, "of the encoder, and of the decoder"),
        target=(128, "target tokens"), clusters=100, top_k=32,
    ).parse_args()  # fmt: skip
    runtime.keep_memory()
    runtime.disable_async_dispatch()
    rows = []
    for length in args.lengths:
        found = measured(args, length)
        show(f"{length:,} source tokens", found)
        rows += found
    report(args, rows)


def measured(args: argparse.Namespace, length: int) -> list[dict[str, Any]]:
    """Measures each kind of attention with one source length; returns a row for each of them."""
    steps, memory = {}, {}
    for kind in KINDS:
        config = configured(args, length, kind)
        params = jax.jit(
            lambda key, c=config: nn.meta.unbox(tasks.from_config(c).initial_params(c, key))
        )(jax.random.key(0))
        inputs = params, random_pair(length, args.target), jax.random.key(1)
        step = jax.jit(jax.grad(partial(loss, config))).lower(*inputs).compile()
        print(f"compiled {kind}, {length} tokens", file=sys.stderr)
        memory[kind] = step.memory_analysis().temp_size_in_bytes / 2**20
        steps[kind] = partial(step, *inputs)
    times = interleaved(steps, args.rounds)
    return [
        {
            "kind": kind, "tokens": length, "median ms": statistics.median(times[kind]),
            "full / it": ratio(times, "full", kind), "MiB": memory[kind],
        }
        for kind in KINDS
    ]  # fmt: skip


def loss(config: Config, params: Any, batch: PairBatch, key: jax.Array) -> jax.Array:
    """Returns the loss of a training step."""
    return tasks.from_config(config).loss(config, params, LossInputs(batch, key))[0]


def configured(args: argparse.Namespace, length: int, kind: str) -> Config:
    """Returns the config of a small model with heads of size 64 and a kind of encoder attention."""
    model = Seq2Seq(
        family=args.family, encoder_layers=args.layers, decoder_layers=args.layers,
        model_dim=args.model_dim, heads=args.model_dim // 64, mlp_dim=4 * args.model_dim,
        vocab_size=VOCABULARY, max_positions=length,
        activation="gelu" if args.family == "bart" else "relu",
    )  # fmt: skip
    return Config(
        seq2seq=model,
        attention=Attention(kind=kind, clusters=args.clusters, top_k=args.top_k),
        pairs=Pairs(max_source_length=length, max_target_length=args.target),
        training=Training(task="summarization"),
    )


def random_pair(length: int, target: int) -> PairBatch:
    """Returns a batch of one random pair that fills its lengths, without padding."""
    rng = np.random.default_rng(0)
    ids = rng.integers(4, VOCABULARY, size=(1, length + target), dtype=np.int32)
    there = np.ones((1, length + target), bool)
    source, out = ids[:, :length], ids[:, length:]
    read = np.concatenate([np.zeros((1, 1), np.int32), out[:, :-1]], axis=1)
    batch = PairBatch(
        source, there[:, :length], read, out, there[:, length:], np.zeros(1, np.int32)
    )
    return jax.tree.map(jax.numpy.asarray, batch)


if __name__ == "__main__":
    runtime.use_huge_pages()  # brt's commands call this, too.
    main()
