"""Computes and measures the costs of each kind of cross-attention, in one interleaved run.

    python tools/benchmark/cross_attention.py [--sources=1024,4096,16384,65536] [--rounds=20]
        [--segment_size=64] [--beams=1] [--train[=wide|small]] [--json=FILE]

First, the costs in the paper's Table 1 and Figure 5 are printed, both as the paper counts them and
with all matrix products. Then a decode step of one layer with the sizes of T5-small (8 heads of 64)
is measured for each length of the source: its milliseconds, and the size of the cache that it
reads. `--train` also measures a training step with each kind: 2 + 2 layers with the width of
T5-small, 1,024 source and 128 target tokens. `--train=small` uses the model of
configs/base/summarization_small.gin, with segments of 64, 16 and 8 tokens. Models take turns;
ratios to full attention are medians over the rounds.
"""

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import cross_costs as costs
import flax.linen as nn
import jax
import jax.numpy as jnp
from conditions import report
from flags import parser
from timing import interleaved, ratio, show

from brt import runtime, tasks
from brt.config import Config, CrossAttention, Pairs, Seq2Seq, Training
from brt.layers.seq2seq import cross_config
from brt.ops import cross_attention
from brt.tasks.arguments import LossInputs
from brt.types import PairBatch

KINDS = get_args(costs.Kind)
HEADS, HEAD_DIM, TARGETS = 8, 64, 128
SHAPES = {  # For training steps: model, source tokens, target tokens, segment sizes.
    "wide": (Seq2Seq(vocab_size=4000), 1024, TARGETS, None),
    "small": (
        Seq2Seq(vocab_size=2000, model_dim=64, heads=4, head_dim=16, mlp_dim=256,
                encoder_attention="sliding", encoder_radius=16),
        128, 32, (64, 16, 8),
    ),
}  # fmt: skip
PAPER_SIZES = ((128, 1024, 64), (128, 1024, 16), (128, 1024, 8), (1024, 8192, 64))


def main() -> None:
    flags = parser(
        __doc__, sources=([1024, 4096, 16384, 65536], "source tokens"), segment_size=64, beams=1,
        rounds=20,
    )  # fmt: skip
    flags.add_argument(
        "--train", nargs="?", const="wide", choices=SHAPES, help="measure training steps, too"
    )
    args = flags.parse_args()
    runtime.keep_memory()
    runtime.disable_async_dispatch()
    found = {"computed": computed(), "decode": [], "train": []}
    show("Computed for one head of 64 (the paper's Table 1 and Figure 5)", found["computed"])
    for sources in args.sources:
        rows = decode_steps(sources, args.segment_size, args.beams, args.rounds)
        show(f"A decode step, {sources:,} source tokens, {args.beams} beams", rows)
        found["decode"] += rows
    if args.train:
        *_, sources, targets, segments = SHAPES[args.train]
        segments = segments or (args.segment_size,)
        found["train"] = train_steps(args.train, segments, max(args.rounds // 4, 3))
        show(f"A training step of a T5, 8 x ({sources:,} + {targets}) tokens", found["train"])
    report(args, found)


def computed() -> list[dict[str, Any]]:
    """Returns the multiplications and stored numbers of the paper's cases, in thousands."""
    rows = []
    for targets, sources, segment in PAPER_SIZES:
        shape = {"targets": targets, "sources": sources, "head_dim": 64, "segment_size": segment}
        for kind in ("full", "segmented", "srformer"):
            row = {"q": targets, "k": sources, "s": segment, "kind": kind}
            row["paper mult. (K)"] = costs.paper_multiplications(kind, **shape) / 1e3
            row["paper memory (K)"] = costs.paper_memory(kind, **shape) / 1e3
            row["real mult. (K)"] = costs.multiplications(kind, **shape) / 1e3
            row["W on P (K)"] = costs.multiplications(kind, **shape, w_on="products") / 1e3
            rows.append(row)
    return rows


def decode_steps(sources: int, segment: int, beams: int, rounds: int) -> list[dict[str, Any]]:
    """Measures one layer's cross-attention of one target position, which reads its cache."""
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (jax.random.normal(key, (1, sources, HEADS, HEAD_DIM)) for key in keys[:2])
    q = jax.random.normal(keys[2], (1, beams, 1, HEADS, HEAD_DIM))
    valid = jnp.ones((1, sources), bool)
    segments = -(-sources // segment)
    functions, kept = {}, {}
    for kind in KINDS:
        section = CrossAttention(kind=kind, segment_size=segment, q_ref=max(TARGETS, segments))
        config = cross_config(section)
        parameters = cross_attention.initial_parameters(keys[0], config, HEADS, HEAD_DIM)
        prefill = jax.jit(partial(cross_attention.prefill, config=config))
        cache = jax.block_until_ready(prefill(k, v, valid, parameters))
        kept[kind] = sum(x.nbytes for x in jax.tree.leaves(cache))
        step = jax.jit(partial(cross_attention.step, config=config))
        functions[kind] = partial(step, q, cache, jnp.array(TARGETS // 2))
    times = interleaved(functions, rounds, repeats=20)
    return [
        {
            "kind": kind,
            "source": sources,
            "ms": min(times[kind]),
            "median ms": statistics.median(times[kind]),
            "of full": ratio(times, kind, "full"),
            "cache MiB": kept[kind] / 2**20,
            "K mult./head": costs.step_multiplications(
                kind, sources=sources, head_dim=HEAD_DIM, segment_size=segment
            )
            / 1e3,
        }
        for kind in KINDS
    ]


def train_steps(shape: str, segments: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Measures the loss with its gradients, without the optimizer; full attention comes first."""
    model, sources, targets, _ = SHAPES[shape]
    model = dataclasses.replace(model, encoder_layers=2, decoder_layers=2, dropout=0.0)
    functions, temporary = {}, {}
    for kind, segment in [("full", segments[0]), *itertools.product(KINDS, segments)]:
        name = kind if kind == "full" else f"{kind}:{segment}"
        if name in functions:
            continue
        config = Config(
            seq2seq=model,
            cross_attention=CrossAttention(kind=kind, segment_size=segment, q_ref=targets),
            training=Training(task="summarization"),
            pairs=Pairs(max_source_length=sources, max_target_length=targets),
        )
        functions[name], temporary[name] = training_step(config)
        print(f"compiled {name}", file=sys.stderr)
    times = interleaved(functions, rounds)
    return [
        {
            "kind": name,
            "ms": min(times[name]),
            "median ms": statistics.median(times[name]),
            "of full": ratio(times, name, "full"),
            "temporary MiB": temporary[name],
        }
        for name in functions
    ]


def training_step(config: Config) -> tuple[Callable[[], Any], float]:
    """Compiles a step on random pairs; returns it and its temporary memory in MiB."""
    key, pairs = jax.random.key(0), config.pairs
    params = nn.meta.unbox(tasks.from_config(config).initial_params(config, key))
    source = jax.random.randint(key, (8, pairs.max_source_length), 2, config.seq2seq.vocab_size)
    target = source[:, : pairs.max_target_length]
    batch = PairBatch(
        source=source, source_mask=jnp.ones(source.shape, bool), target_in=target,
        target_out=target, scored=jnp.ones(target.shape, bool), row=jnp.arange(8),
    )  # fmt: skip

    def loss(params: Any, batch: PairBatch) -> Any:
        return tasks.from_config(config).loss(config, params, LossInputs(batch, key))

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, batch).compile()
    return partial(compiled, params, batch), compiled.memory_analysis().temp_size_in_bytes / 2**20


if __name__ == "__main__":
    runtime.use_huge_pages()  # brt's commands call this, too.
    main()
